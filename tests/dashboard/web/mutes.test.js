// Which rules are muted, and until when.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Mutes } from "../../../dashboard/capflow_dashboard/web/mutes.js";
import { Store } from "../../../dashboard/capflow_dashboard/web/store.js";

const LEAK = { name: "leak", text: "share(code) > 5%" };
const LOST = { name: "lost", text: "lost > 0" };

/** A storage that keeps, or that refuses as a browser does without the right to keep anything. */
function storage(refuses = false) {
  /** @type {Map<string, string>} */ const kept = new Map();
  const check = () => {
    if (refuses) throw new DOMException("denied", "SecurityError");
  };
  return {
    kept,
    getItem(/** @type {string} */ key) {
      check();
      return kept.get(key) ?? null;
    },
    setItem(/** @type {string} */ key, /** @type {string} */ text) {
      check();
      kept.set(key, text);
    },
  };
}

test("a mute ends at its time, or when it is ended, and outlives the page", () => {
  let now = 1000;
  const kept = storage();
  const mutes = new Mutes(kept, () => now);
  assert.equal(mutes.until(LEAK), null);
  mutes.mute(LEAK, 500);
  mutes.mute(LOST, 0);
  now = 1499;
  const later = new Mutes(kept, () => now);
  assert.deepEqual([later.until(LEAK), later.until(LOST)], [1500, 0]);
  now = 1500;
  assert.deepEqual([later.until(LEAK), later.until(LOST)], [null, 0]);
  later.mute(LOST, null);
  // Another page of the browser hears of it.
  assert.equal(mutes.until(LOST), null);
});

test("a rule that is changed is heard", () => {
  const mutes = new Mutes(storage());
  mutes.mute(LEAK, 0);
  assert.equal(mutes.until({ ...LEAK, text: "share(code) > 9%" }), null);
});

test("without a storage a mute holds as long as the page", () => {
  for (const mutes of [new Mutes(null), new Mutes(storage(true))]) {
    mutes.mute(LEAK, 0);
    assert.equal(mutes.until(LEAK), 0);
    mutes.mute(LEAK, null);
    assert.equal(mutes.until(LEAK), null);
  }
});

test("what is no mute in the storage is none, and it does not grow", () => {
  const kept = storage();
  for (const text of ["{", "null", "[1]", '"x"', "7", '{"leak: share(code) > 5%": "soon"}']) {
    kept.kept.set("capflow-mutes", text);
    const mutes = new Mutes(kept);
    assert.equal(mutes.until(LEAK), null);
    mutes.mute(LOST, 0);
    assert.equal(mutes.until(LOST), 0);
  }
  const mutes = new Mutes(kept);
  for (let number = 0; number < 200; number++) mutes.mute({ name: `r${number}`, text: "" }, 0);
  assert.equal(Object.keys(JSON.parse(kept.kept.get("capflow-mutes") ?? "")).length, 64);
  assert.equal(mutes.until({ name: "r199", text: "" }), 0);
});

test("the store keeps the latest changes", () => {
  const store = new Store();
  const change = (/** @type {number} */ at_s) => /** @type {any} */ ({ rule: "leak", at_s });
  const none = new Float32Array();
  const changes = Array.from({ length: 90 }, (_, at) => change(at));
  assert.ok(store.take({ alerts: { states: [], changes } }, none, 0).has("alerts"));
  store.take({ alerts: { states: [/** @type {any} */ ({ rule: "leak" })], changes: changes.slice(0, 20) } }, none, 0);
  assert.deepEqual(
    [store.alerts.states.length, store.alerts.changes.length, store.alerts.changes[0].at_s],
    [1, 100, 10],
  );
});
