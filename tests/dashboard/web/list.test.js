// The list: the filter language, the order, and the address of what is shown.

import assert from "node:assert/strict";
import { test } from "node:test";
import { haystack, parse } from "../../../dashboard/capflow_dashboard/web/filter.js";
import { ordered } from "../../../dashboard/capflow_dashboard/web/order.js";
import { nameOf, nowhere, read, write } from "../../../dashboard/capflow_dashboard/web/place.js";
import { Store } from "../../../dashboard/capflow_dashboard/web/store.js";

function storeOf(requests) {
  const store = new Store();
  const probes = [{ name: "code", site: "post_block:1", threshold: 1, pool: "token" }];
  store.take(
    { engines: [{ name: "e1", model: "m", probes, gone: false, problems: [], sites: [] }] },
    new Float32Array(0),
  );
  const whole = requests.map((request, i) => ({
    key: i + 1,
    id: `cmpl-${i + 1}`,
    engine: "e1",
    status: "stop",
    prompt_length: 4,
    tokens: 10 * (i + 1),
    started_s: i,
    ended_s: i + 1,
    rows_lost: 0,
    steered: 0,
    text: "",
    probes: [[i, i / 2, i, i]],
    ...request,
  }));
  store.take({ requests: whole }, new Float32Array(0));
  return store;
}

const store = storeOf([
  { text: "The capital of France is", status: "live", steered: 3 },
  { text: "def hello(): pass", rows_lost: 7 },
  { text: 'He said "two words"', id: "Zürich-1", status: "error", engine: "other" },
  { text: "capital letters", probes: [[null, null, null, null]] },
]);

const found = (query) => {
  const filter = parse(query);
  assert.deepEqual(filter.errors, [], query);
  return [...store.requests]
    .filter(([key, one]) => filter.test(one, store.haystacks.get(key), store))
    .map(([key]) => key);
};

test("each term of the language chooses requests", () => {
  const cases = {
    "": [1, 2, 3, 4],
    capital: [1, 4],
    "CAPITAL france": [1],
    "cmpl-2": [2],
    zürich: [3],
    '"capital of"': [1],
    'text:"capital of"': [1],
    '"\\"two words\\""': [3],
    "id:zür": [3],
    "engine:other": [3],
    "status:live": [1],
    "status:done": [2, 3, 4],
    "-status:done": [1],
    "steered:yes": [1],
    "steered:no": [2, 3, 4],
    "steered:>2": [1],
    "lost:yes": [2],
    "tokens:>=20 tokens:<40": [2, 3],
    "probe:code>0": [2],
    "probe:code>=0": [1, 2],
    "mean:code=0.5": [2],
    "probe:code>-1 -capital": [2],
    "fired:code": [2],
    "probe:other>0": [],
    "  capital   -france ": [4],
  };
  for (const [query, keys] of Object.entries(cases)) assert.deepEqual(found(query), keys, query);
});

test("a term that is not understood is an error that says what is expected, and chooses everything", () => {
  for (const query of ["status:running", "probe:code", "colour:red", "tokens:many", "tokens:x>3"]) {
    const filter = parse(query);
    assert.equal(filter.errors.length, 1, query);
    assert.match(filter.errors[0], /expected/);
    assert.ok(filter.test(store.requests.get(1), "", store));
  }
});

test("no query makes the parser fail or hang", () => {
  for (const query of [
    '"',
    '""',
    "-",
    ":",
    "a:",
    '"\\',
    "probe:",
    "probe:>",
    "-".repeat(4000),
    '"'.repeat(4001),
    "\u202e\u0000",
  ]) {
    assert.equal(typeof parse(query).test(store.requests.get(1), haystack(store.requests.get(1)), store), "boolean");
  }
});

test("requests are sorted both ways, those without a number last, and pinned ones first", () => {
  const keys = (sort, pins = []) => ordered(store, { q: "", sort, pins }).keys;
  assert.deepEqual(keys("-started"), [4, 3, 2, 1]);
  assert.deepEqual(keys("started"), [1, 2, 3, 4]);
  assert.deepEqual(keys("-tokens"), [4, 3, 2, 1]);
  // The engine of the third has no probe, and the fourth has no score.
  assert.deepEqual(keys("-max:code"), [2, 1, 4, 3]);
  assert.deepEqual(keys("max:code"), [1, 2, 4, 3]);
  assert.deepEqual(keys("-nonsense"), [4, 3, 2, 1]);
  assert.deepEqual(keys("-started", [nameOf("e1", "cmpl-2")]), [2, 4, 3, 1]);
});

test("a pinned request stays when the filter leaves it out", () => {
  const pins = [nameOf("other", "Zürich-1")];
  assert.deepEqual(ordered(store, { q: "france", sort: "-started", pins }).keys, [3, 1]);
});

const NASTY = ["a/b?c#d&e=f", "‮rtl‬", "​​", "%2F%", "ü ".repeat(150), "<b>", "x\ud800y", ".", ".."];

test("an address gives back the place that wrote it, whatever the names are", () => {
  for (const id of NASTY) {
    const place = {
      ...nowhere(),
      engine: id,
      id,
      pos: 37,
      by: "probe:code@post_block:1",
      scale: "log",
      ref: "baseline",
      heat: "probes",
      from: 3,
      to: 90,
      q: 'text:"a&b" #x',
      sort: "-max:code",
      probe: "a b",
      hold: true,
      thresholds: new Map([
        [`probe:${id}@post_block:1`, -0.25],
        ["probe:b@post_block:2", 1e-9],
      ]),
      pins: [nameOf(id, id)],
    };
    const back = read(write(place));
    const whole = id.replace("\ud800", "\ufffd");
    const thresholds = new Map([...place.thresholds].map(([name, value]) => [name.replace("\ud800", "\ufffd"), value]));
    assert.deepEqual(back, { ...place, id: whole, engine: whole, thresholds });
    assert.equal(write(back), write(place));
  }
  for (const view of ["requests", "health"]) assert.equal(read(write({ ...nowhere(), view })).view, view);
});

test("an address that says nothing sensible is the default", () => {
  const nonsense = [
    "",
    "#",
    "#/",
    "#/r/%E0%A4%A/x",
    "#/r/a",
    "#/nothing",
    "#/?pos=-1&scale=x&from=9&to=2&heat=__proto__",
    "#/r/a/b/c",
    "#/?threshold=&threshold=1&threshold=@a&threshold=x@a&threshold=Infinity@a&threshold=1@",
  ];
  for (const hash of nonsense) assert.deepEqual(read(hash), nowhere(), hash);
  assert.equal(write(nowhere()), "#/");
});
