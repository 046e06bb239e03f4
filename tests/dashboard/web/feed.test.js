// Messages: how they are read and merged.

import assert from "node:assert/strict";
import { test } from "node:test";
import {
  count,
  duration,
  modelName,
  number,
  short,
  show,
  size,
  tokenText,
  visible,
} from "../../../dashboard/capflow_dashboard/web/format.js";
import { decode, MISSING } from "../../../dashboard/capflow_dashboard/web/protocol.js";
import { Store } from "../../../dashboard/capflow_dashboard/web/store.js";

function encode(head, numbers = []) {
  let text = new TextEncoder().encode(JSON.stringify(head));
  const padded = new Uint8Array(Math.ceil(text.length / 4) * 4).fill(32);
  padded.set(text);
  text = padded;
  const buffer = new ArrayBuffer(4 + text.length + 4 * numbers.length);
  new DataView(buffer).setUint32(0, text.length, true);
  new Uint8Array(buffer, 4).set(text);
  new Float32Array(buffer, 4 + text.length).set(numbers);
  return buffer;
}

const NORM = { site: "post_block:0", hook: "post_block", layer: 0, probe: "", threshold: 0, pool: "" };
const REQUEST = {
  key: 1,
  id: "r1",
  engine: "e",
  status: "live",
  prompt_length: 2,
  tokens: 2,
  started_s: 1,
  ended_s: null,
  rows_lost: 0,
  steered: 0,
  text: "x",
  probes: [],
};
const detail = (first, count, more = {}) => ({
  key: 1,
  base: 0,
  first,
  count,
  ids: Array(count).fill(5),
  texts: Array(count).fill("t"),
  steered: [],
  fresh: false,
  ...more,
});

test("a message is its head and its numbers, as the server wrote them", () => {
  const { head, numbers } = decode(encode({ seq: 3, requests: [{ key: 1, id: "‮ü" }] }, [1.5, NaN, MISSING]));
  assert.deepEqual(head, { seq: 3, requests: [{ key: 1, id: "‮ü" }] });
  assert.deepEqual([...numbers], [1.5, NaN, MISSING]);
  assert.equal(decode(encode({})).numbers.length, 0);
});

test("changed fields are merged, and gone requests forgotten", () => {
  const store = new Store();
  store.take({ requests: [REQUEST] }, new Float32Array(0));
  const changed = store.take(
    { requests: [{ key: 1, tokens: 9, status: "stop" }], sparks: { 1: [1, null] } },
    new Float32Array(0),
  );
  assert.deepEqual(store.requests.get(1), { ...REQUEST, tokens: 9, status: "stop" });
  assert.deepEqual(store.sparks.get(1), [1, null]);
  assert.ok(changed.has("requests"));
  store.take({ gone: [1] }, new Float32Array(0));
  assert.deepEqual([store.requests.size, store.sparks.size, store.haystacks.size], [0, 0, 0]);
});

test("columns are merged at their places, and arrays grow as they come", () => {
  const store = new Store();
  store.take(
    { requests: [REQUEST], detail: detail(0, 2, { fresh: true, series: [NORM], baseline: null }) },
    Float32Array.of(1, 2),
  );
  for (let first = 2; first < 900; first++) store.take({ detail: detail(first, 1) }, Float32Array.of(first + 1));
  store.take({ detail: detail(1, 2, { steered: [2, 3], texts: ["a", "b"] }) }, Float32Array.of(NaN, MISSING));
  const { detail: merged } = store;
  assert.equal(merged.count, 900);
  assert.deepEqual([...merged.values[0].subarray(0, 4)], [1, NaN, MISSING, 4]);
  assert.equal(merged.values[0][899], 900);
  assert.deepEqual([...merged.steered.subarray(0, 4)], [0, 0, 1, 0]);
  assert.deepEqual(merged.texts.slice(0, 4), ["t", "a", "b", "t"]);
  assert.ok(merged.capacity < 4 * 900);
});

test("a column that comes again without steering is not steered", () => {
  const store = new Store();
  const fresh = detail(0, 4, { fresh: true, series: [NORM], steered: [1, 3] });
  store.take({ requests: [REQUEST], detail: fresh }, new Float32Array(4));
  assert.deepEqual([...store.detail.steered.subarray(0, 4)], [0, 1, 1, 0]);
  store.take({ detail: detail(1, 1) }, new Float32Array(1));
  assert.deepEqual([...store.detail.steered.subarray(0, 4)], [0, 0, 1, 0]);
});

test("tokens of another request, or with another base, are left out", () => {
  const store = new Store();
  store.take({ requests: [REQUEST], detail: detail(0, 1, { fresh: true, series: [NORM] }) }, Float32Array.of(1));
  store.take({ detail: detail(1, 1, { base: 4 }) }, Float32Array.of(2));
  store.take({ detail: { ...detail(1, 1), key: 2 } }, Float32Array.of(2));
  assert.equal(store.detail.count, 1);
});

test("references outlive the rows that they were computed of", () => {
  const store = new Store();
  const prompt = { ...REQUEST, prompt_length: 16 };
  const values = Float32Array.from({ length: 16 }, (_, i) => i);
  store.take({ requests: [prompt], detail: detail(0, 16, { fresh: true, series: [NORM] }) }, values);
  const [reference] = store.detail.references.all;
  assert.equal(reference.median, 7.5);
  const news = detail(0, 16, { fresh: true, series: [NORM], base: 64 });
  store.take(
    { detail: news },
    values.map((value) => value + 100),
  );
  assert.equal(store.detail.references.all[0], reference);
});

test("rates keep two minutes, events are bounded", () => {
  const store = new Store();
  const many = Array(300).fill(1);
  store.take({ rates: { last: 300, tokens: many, rows: many, bytes: many } }, new Float32Array(0));
  assert.equal(store.rates.tokens.length, 120);
});

test("the newest running request is the newest of all that run", () => {
  const store = new Store();
  const all = [
    [1, "live"],
    [2, "stop"],
    [3, "stop"],
  ].map(([key, status]) => ({ ...REQUEST, key, status, id: `r${key}` }));
  store.take({ requests: all }, new Float32Array(0));
  assert.equal(store.newest, 1);
  store.take({ requests: [{ key: 1, status: "stop" }] }, new Float32Array(0));
  assert.equal(store.newest, 3);
  assert.equal(store.find("e", "r2"), 2);
});

test("numbers, sizes and times are short and have their units", () => {
  assert.deepEqual([NaN, Infinity, MISSING, -0.5, 1234567, 0].map(show), [
    "NaN",
    "infinite",
    "no row",
    "−0.5",
    "1.23e+6",
    "0",
  ]);
  assert.deepEqual([null, undefined, NaN, 2].map(number), ["–", "–", "–", "2"]);
  assert.deepEqual([999, 9100, 99500, 2.4e6].map(short), ["999", "9.1k", "100k", "2.4M"]);
  assert.deepEqual([0, 1023, 1536].map(size), ["0 B", "1020 B", "1.5 KiB"]);
  assert.deepEqual([0.04, 0.9999, 12, 250, 7500, null].map(duration), [
    "40 ms",
    "1.0 s",
    "12 s",
    "4 min 10 s",
    "2 h 5 min",
    "–",
  ]);
  assert.equal(count(12345), "12,345");
});

test("a model is called by its name, not by its place on the disk", () => {
  const cache = "/root/.cache/huggingface/hub/models--google--gemma-3-270m-it/snapshots/ac82b4e8";
  assert.deepEqual([cache, "Qwen/Qwen3-0.6B", "/data/models/my-model/", "./model", "demo"].map(modelName), [
    "google/gemma-3-270m-it",
    "Qwen/Qwen3-0.6B",
    "my-model",
    "model",
    "demo",
  ]);
});

test("names and tokens that show nothing are shown", () => {
  assert.equal(visible("​‮x"), "‹200B›‹202E›x");
  assert.equal(visible("  "), "“  ”");
  assert.deepEqual(
    [
      ["a\nb", 1],
      ["", 7],
      [null, 7],
      ["​", 7],
      ["", -1],
      ["\t", 1],
    ].map(([text, id]) => tokenText(text, id)),
    ["a⏎\nb", "#7", "#7", "#7", "·", "⇥\t"],
  );
});
