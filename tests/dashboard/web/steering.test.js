// Steering: names and numbers, the slider, held buttons, arming, what is held, and the messages of the desk.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Actions, ANSWER_MS, SHOWN_MAX, stateText } from "../../../dashboard/capflow_dashboard/web/actions.js";
import { ARMED_MS, Arming } from "../../../dashboard/capflow_dashboard/web/arming.js";
import { ALIVE_MS, Desk } from "../../../dashboard/capflow_dashboard/web/desk.js";
import { heldCount, holdsOf, holdText } from "../../../dashboard/capflow_dashboard/web/holds.js";
import { claimName, nextNumber, pageName } from "../../../dashboard/capflow_dashboard/web/naming.js";
import { GAP_MS, Pace } from "../../../dashboard/capflow_dashboard/web/pace.js";
import { AGAIN_MS, HOLD_MS, Press } from "../../../dashboard/capflow_dashboard/web/press.js";
import { amount, bounds, ratioOf, short, within } from "../../../dashboard/capflow_dashboard/web/ratio.js";

/** A clock that moves when the test says so. */
class Clock {
  time = 0;
  timers = new Map();
  count = 0;
  now = () => this.time;
  later = (call, ms) => {
    this.timers.set(++this.count, { at: this.time + ms, call });
    return this.count;
  };
  every = (call, ms) => {
    const id = ++this.count;
    const again = () => {
      this.timers.set(id, { at: this.time + ms, call: again });
      call();
    };
    this.timers.set(id, { at: this.time + ms, call: again });
    return id;
  };
  cancel = (id) => this.timers.delete(id);
  pass(ms) {
    const end = this.time + ms;
    for (;;) {
      const due = [...this.timers].filter(([, timer]) => timer.at <= end).sort((a, b) => a[1].at - b[1].at)[0];
      if (!due) break;
      this.timers.delete(due[0]);
      this.time = due[1].at;
      due[1].call();
    }
    this.time = end;
  }
}

function storage(entries = {}) {
  const kept = new Map(Object.entries(entries));
  return { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value), kept };
}

test("a page keeps its name over a reload, and another tab gets another", async () => {
  const random = (bytes) => bytes.map((_, i) => i * 31 + 5);
  const kept = storage();
  const name = pageName(kept, random);
  assert.match(name, /^[a-z0-9]{8}$/);
  assert.equal(
    pageName(kept, () => assert.fail()),
    name,
  );
  assert.notEqual(pageName(storage({ "capflow-page": "Not a name" }), random), "Not a name");
  const held = new Set();
  const locks = {
    request: (lock, _options, granted) => {
      if (held.has(lock)) return Promise.reject(new Error("aborted"));
      held.add(lock);
      return granted();
    },
  };
  assert.equal(await claimName(kept, random, locks), name);
  const copied = storage(Object.fromEntries(kept.kept));
  const other = await claimName(copied, (bytes) => bytes.map((_, i) => i * 7 + 1), locks);
  assert.notEqual(other, name);
  assert.equal(copied.getItem("capflow-page"), other);
});

test("letters of a name are equally likely", () => {
  let byte = -1;
  const random = (bytes) => bytes.map(() => (byte = (byte + 1) % 256));
  const counts = new Map();
  for (let i = 0; i < 900; i++) {
    for (const letter of pageName(storage(), random)) counts.set(letter, (counts.get(letter) ?? 0) + 1);
  }
  assert.equal(counts.size, 36);
  assert.ok(Math.max(...counts.values()) < 1.2 * Math.min(...counts.values()));
});

test("numbers of actions rise, over reloads and when the clock is set back", () => {
  const kept = storage();
  const numbers = [1000, 1000, 1000.7, 900, 2000].map((now) => nextNumber(kept, now));
  assert.deepEqual(numbers, [1000, 1001, 1002, 1003, 2000]);
  assert.equal(nextNumber(storage(Object.fromEntries(kept.kept)), 1500), 2001);
});

test("the slider stays within the server's bounds, and says what it does", () => {
  assert.deepEqual(bounds("add", 0.5), { low: -50, high: 50, still: 0 });
  assert.deepEqual(bounds("add", 0.29), { low: -29, high: 29, still: 0 });
  assert.deepEqual(bounds("remove", 0.5), { low: 0, high: 100, still: 0 });
  assert.deepEqual(bounds("gain", 0.5), { low: 0, high: 100, still: 100 });
  assert.deepEqual(
    [80, -80, 12.4, NaN].map((percent) => within(percent, bounds("add", 0.5))),
    [50, -50, 12, 0],
  );
  for (let percent = -50; percent <= 50; percent++) assert.ok(Math.abs(ratioOf(percent)) <= 0.5);
  assert.equal(ratioOf(29), 0.29);
  assert.equal(amount("add", 25, "post_block:12"), "25 % of the stream's norm at post_block:12");
  assert.equal(amount("add", -5, "post_block:12"), "−5 % of the stream's norm at post_block:12");
  assert.equal(short("add", "calm", 25), "calm +25 %");
  assert.equal(short("remove", "calm", 50), "calm removed by 50 %");
  assert.equal(short("gain", "glad", 0), "glad at 0 %");
});

test("a button runs when it is held, and not before", () => {
  const clock = new Clock();
  const ran = [];
  const press = new Press(() => {}, clock);
  const run = () => ran.push(clock.time);
  press.down("apply", run, 0);
  clock.pass(HOLD_MS - 1);
  assert.deepEqual([ran, press.of("apply")], [[], "holding"]);
  clock.pass(1);
  press.up("apply", run, clock.time);
  assert.deepEqual([ran, press.of("apply")], [[HOLD_MS], "rest"]);
});

test("a quick click and a double click run nothing", () => {
  const clock = new Clock();
  const press = new Press(() => {}, clock);
  const run = () => assert.fail();
  for (const at of [0, 90, 200, 400]) {
    clock.pass(at - clock.time);
    press.down("apply", run, at);
    press.up("apply", run, at + 40);
  }
  assert.equal(press.of("apply"), "again");
  clock.pass(AGAIN_MS);
  assert.equal(press.of("apply"), "rest");
  press.down("apply", run, clock.time);
  press.rest();
  clock.pass(10 * HOLD_MS);
});

test("a slow second press runs once, another button's does not count", () => {
  const clock = new Clock();
  const ran = [];
  const press = new Press(() => {}, clock);
  press.click("apply", () => ran.push("apply"), 0);
  clock.pass(1000);
  press.click("abort", () => ran.push("abort"), 1000);
  assert.deepEqual(ran, []);
  clock.pass(1000);
  press.click("abort", () => ran.push("abort"), 2000);
  clock.pass(10 * HOLD_MS);
  assert.deepEqual(ran, ["abort"]);
});

test("a press that a busy page hears of late counts as long as it was", () => {
  const clock = new Clock();
  let ran = 0;
  const press = new Press(() => {}, clock);
  press.down("apply", () => ran++, 0);
  // The timer is late: the release comes first.
  press.up("apply", () => ran++, HOLD_MS + 50);
  clock.pass(10 * HOLD_MS);
  assert.equal(ran, 1);
});

test("moves are sent at most four times a second, the last always", () => {
  const clock = new Clock();
  const sent = [];
  const pace = new Pace((value) => sent.push([clock.time, value]), clock);
  for (let value = 0; value <= 100; value++) {
    pace.offer(value);
    clock.pass(10);
  }
  clock.pass(GAP_MS);
  assert.equal(sent.at(-1)[1], 100);
  assert.ok(sent.length <= 6);
  for (let i = 1; i < sent.length; i++) assert.ok(sent[i][0] - sent[i - 1][0] >= GAP_MS);
  pace.offer(1);
  pace.offer(2);
  pace.drop();
  clock.pass(10 * GAP_MS);
  assert.notEqual(sent.at(-1)[1], 2);
});

function arming() {
  const clock = new Clock();
  const state = new Arming(() => {}, clock);
  state.choose({ request: 7, way: "add", name: "calm", percent: 25 });
  return { clock, state };
}

test("nothing is applied that was not armed and previewed", () => {
  const { state } = arming();
  assert.equal(state.apply(), null);
  state.preview(1);
  assert.equal(state.stage, "safe");
  state.arm();
  assert.equal(state.apply(), null);
  state.preview(1);
  assert.deepEqual(state.apply(), { request: 7, way: "add", name: "calm", percent: 25 });
  assert.equal(state.stage, "applied");
});

test("another target, name or way must be previewed again; moves of what is applied are sent", () => {
  for (const change of [{ request: 8 }, { name: "angry" }, { way: "remove" }]) {
    const { state } = arming();
    state.arm();
    state.preview(1);
    assert.equal(state.choose({ percent: 30 }), false);
    assert.equal(state.stage, "preview");
    assert.equal(state.apply().percent, 30);
    assert.equal(state.choose({ percent: 30 }), false);
    assert.equal(state.choose({ percent: 31 }), true);
    assert.equal(state.choose(change), false);
    assert.equal(state.stage, "armed");
    assert.equal(state.choose({ percent: 32 }), false);
  }
});

test("all requests need their number", () => {
  const { state } = arming();
  state.choose({ request: 0 });
  state.arm();
  state.preview(12);
  for (const text of ["", "1", "13", "12x"]) {
    state.type(text);
    assert.equal(state.apply(), null);
  }
  state.type(" 12 ");
  assert.equal(state.apply().request, 0);
});

test("it disarms after a minute without use", () => {
  const { clock, state } = arming();
  state.arm();
  state.preview(1);
  clock.pass(ARMED_MS - 1);
  state.choose({ percent: 26 });
  clock.pass(ARMED_MS - 1);
  assert.equal(state.stage, "preview");
  clock.pass(1);
  assert.equal(state.stage, "safe");
  assert.equal(state.apply(), null);
  assert.equal(clock.timers.size, 0);
});

const HELD = { request: 1, kind: "steer", name: "calm", mode: "add", ratio: 0.25, page: "me" };

test("what is held on a request goes before what is held on all", () => {
  const all = { ...HELD, request: 0, ratio: -0.1, page: "other" };
  const gain = { ...HELD, request: 0, kind: "gain", name: "glad", ratio: 0.5, page: "other" };
  const holds = [all, HELD, gain];
  assert.deepEqual(holdsOf(holds, 1, true), [HELD, gain]);
  assert.deepEqual(holdsOf(holds, 2, true), [all, gain]);
  assert.deepEqual(holdsOf(holds, 2, false), []);
  assert.deepEqual(
    holds.map((hold) => holdText(hold, "me")),
    [
      "calm −10 % on all requests, by another page",
      "calm +25 %, by this page",
      "glad at 50 % on all requests, by another page",
    ],
  );
  assert.equal(heldCount(holds, "me"), "3 held, 1 by this page");
  assert.equal(heldCount([], "me"), "nothing held");
});

test("answers are found by their number, and said in words", () => {
  const actions = new Actions();
  const add = (id, more = {}) => actions.add(id, `action ${id}`, { now: id, atS: 0, ...more });
  for (let id = 1; id <= SHOWN_MAX + 5; id++) add(id);
  assert.equal(actions.entries.length, SHOWN_MAX);
  assert.equal(actions.take({ id: 1, state: "applied" }), null);
  const texts = [
    [{ state: "applied", step: 7, position: 1200 }, "applied in step 7 from position 1,200"],
    [{ state: "applied", step: 7 }, "applied in step 7"],
    [{ state: "applied", reason: "nothing was steered" }, "applied: nothing was steered"],
    [{ state: "rejected", reason: "<b>no</b>" }, "rejected: <b>no</b>"],
    [{ state: "unknown", reason: "" }, "unknown"],
    [{ state: "waiting", reason: "no request is running" }, "waiting: no request is running"],
  ];
  for (const [ack, text] of texts) assert.equal(stateText(actions.take({ id: 20, ...ack })), text);
  assert.equal(actions.expire(ANSWER_MS + 10).length, 5);
  assert.equal(stateText(actions.entries.at(-1)), "no answer after 15 s");
  assert.equal(actions.take({ id: 8, state: "applied", step: 1 }).state, "applied");
  add(90, { moves: true });
  add(91, { moves: true });
  assert.deepEqual(
    actions.entries.slice(0, 2).map((entry) => entry.id),
    [91, 25],
  );
});

const OFFER = { vectors: [{ name: "calm", site: "post_block:2" }], modules: [], ratio_max: 0.5, lease_s: 6 };
const HELLO = { rights: ["watch", "steer"], steering: OFFER, source: { kind: "live", name: "" } };
const CHOICE = { request: 1, way: "add", name: "calm", percent: 25 };

function desk(hello = HELLO) {
  const clock = new Clock();
  const sent = [];
  const said = [];
  const state = { open: true };
  let number = 100;
  const one = new Desk("me", {
    send: (message) => state.open && sent.push(message) > 0,
    now: clock.now,
    number: () => ++number,
    every: clock.every,
    stop: clock.cancel,
    changed: () => {},
    say: (text) => said.push(text),
  });
  if (hello) one.greet(hello);
  return { clock, desk: one, sent, said, state };
}

test("without the right, and of a stored source, nothing is sent", () => {
  for (const hello of [
    null,
    { ...HELLO, rights: ["watch"], steering: null },
    { ...HELLO, source: { kind: "stored", name: "rows" } },
  ]) {
    const { clock, desk: one, sent } = desk(hello);
    one.kill();
    one.release();
    one.steer(CHOICE, "r1");
    one.unsteer(1, "r1");
    one.abort(1, "r1");
    one.take({ steering: { frozen: false, holds: [{ ...HELD, page: "me" }] } });
    one.beat();
    clock.pass(10 * ALIVE_MS);
    assert.deepEqual(sent, []);
  }
});

test("a page says its name at once, and that it is alive each second while it holds something", () => {
  const { clock, desk: one, sent } = desk();
  assert.deepEqual(sent, [{ alive: "me" }]);
  clock.pass(10 * ALIVE_MS);
  assert.equal(sent.length, 1);
  one.steer(CHOICE, "r1");
  assert.deepEqual(sent[1], { act: { id: 101, kind: "steer", request: 1, name: "calm", ratio: 0.25, mode: "add" } });
  one.take({ steering: { frozen: false, holds: [HELD] }, acks: [{ id: 101, state: "applied", step: 7, position: 5 }] });
  clock.pass(5 * ALIVE_MS);
  assert.deepEqual(sent.slice(2), Array(5).fill({ alive: "me" }));
  // Messages also make it say so, for timers of hidden pages are slow, but not more often.
  for (let i = 0; i < 10; i++) one.beat();
  assert.equal(sent.length, 7);
  one.take({ steering: { frozen: false, holds: [{ ...HELD, page: "other" }] } });
  clock.pass(10 * ALIVE_MS);
  assert.equal(sent.length, 7);
  assert.equal(clock.timers.size, 0);
});

test("an action without an answer is given up, and not taken for one that holds", () => {
  const { clock, desk: one, sent, said } = desk();
  one.steer(CHOICE, "r1");
  clock.pass(ANSWER_MS + 2 * ALIVE_MS);
  assert.equal(said.at(-1), "calm +25 % on r1: no answer after 15 s");
  const { length } = sent;
  clock.pass(10 * ALIVE_MS);
  assert.equal(sent.length, length);
});

test("a module is scaled, and what is rejected holds nothing", () => {
  const { clock, desk: one, sent, said } = desk();
  one.steer({ request: 0, way: "gain", name: "glad", percent: 50 }, "all requests");
  assert.deepEqual(sent[1], { act: { id: 101, kind: "gain", request: 0, name: "glad", ratio: 0.5 } });
  one.take({ acks: [{ id: 101, state: "rejected", reason: "no" }] });
  assert.deepEqual(said, ["glad at 50 % on all requests: rejected: no"]);
  clock.pass(10 * ALIVE_MS);
  assert.equal(sent.length, 2);
});

test("the kill switch is sent at once, and again once there is a connection", () => {
  const { desk: one, sent, said, state } = desk();
  state.open = false;
  one.kill();
  assert.equal(sent.length, 1);
  assert.deepEqual(said, ["Stop all steering: not sent: no connection to capflow"]);
  state.open = true;
  one.greet(HELLO);
  assert.deepEqual(sent.slice(1), [{ alive: "me" }, { act: { id: 101, kind: "kill" } }]);
  one.take({ steering: { frozen: true, holds: [] } });
  assert.deepEqual([one.frozen, one.killing, said.at(-1)], [true, 0, "All steering is off"]);
  one.greet(HELLO);
  assert.equal(sent.length, 4);
  one.release();
  assert.equal(sent.at(-1).act.kind, "release");
  one.take({ steering: { frozen: false, holds: [] } });
  assert.equal(said.at(-1), "Steering is possible again");
});

test("a kill switch without an answer is sent again, however late a connection comes", () => {
  const { clock, desk: one, sent } = desk();
  one.kill();
  clock.pass(10 * ANSWER_MS);
  assert.equal(sent.length, 2);
  one.greet(HELLO);
  assert.deepEqual(sent.at(-1), { act: { id: 101, kind: "kill" } });
});

test("a kill switch that was released by another page meanwhile is sent again too", () => {
  const { desk: one, sent, state } = desk();
  one.take({ steering: { frozen: true, holds: [] } });
  state.open = false;
  one.kill();
  state.open = true;
  one.greet(HELLO);
  assert.deepEqual(sent.at(-1), { act: { id: 101, kind: "kill" } });
  one.take({ steering: { frozen: false, holds: [] }, acks: [{ id: 101, state: "applied" }] });
  assert.equal(one.killing, 0);
});
