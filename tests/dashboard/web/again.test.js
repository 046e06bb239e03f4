// A request that is run again: what came of it, and the first token that differs.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Run, split } from "../../../dashboard/capflow_dashboard/web/again.js";

const part = (pieces, more = {}) => ({ request: "r", pieces, over: false, finish: null, error: "", ...more });
const words = (...ids) => ids.map((id) => [[id], `w${id} `]);

function run(plain, steered) {
  const made = new Run(1, "calm");
  made.take({ id: 1, label: "l", plain, steered });
  return made;
}

test("pieces are added up, and news of another run is not taken", () => {
  const made = run(part(words(1, 2)), undefined);
  made.take({ id: 1, plain: part(words(3), { over: true, finish: "stop" }), steered: part([[[1, 2], "ab"]]) });
  made.take({ id: 2, plain: part(words(9)) });
  assert.deepEqual(made.sides.plain.pieces, words(1, 2, 3));
  assert.deepEqual([made.sides.plain.tokens, made.sides.steered.tokens], [3, 2]);
  assert.equal(made.sides.plain.finish, "stop");
  assert.equal(made.over, false);
  made.take({ id: 1, steered: part([], { over: true, error: "gone" }) });
  assert.equal(made.over, true);
  assert.equal(made.sides.plain.error, "");
});

test("the first difference is named once both sides have a token there", () => {
  assert.equal(run(part(words(1, 2, 3)), part(words(1))).difference, -1);
  assert.equal(run(part(words(1, 2, 3)), part(words(1, 5))).difference, 1);
  assert.equal(run(part(words(4)), part([[[5, 6], "x"]])).difference, 0);
  assert.equal(run(part(words(1, 2)), part([[[1, 2], "x"]])).difference, -1);
  assert.equal(run(undefined, undefined).difference, -1);
});

test("an answer that ended by itself differs from a longer one behind its end", () => {
  const stopped = { over: true, finish: "stop" };
  assert.equal(run(part(words(1), stopped), part(words(1, 2))).difference, 1);
  assert.equal(run(part(words(1, 2)), part(words(1), stopped)).difference, 1);
  assert.equal(run(part(words(1), { over: true, finish: "length" }), part(words(1, 2))).difference, -1);
  assert.equal(run(part(words(1), { over: true, error: "stopped" }), part(words(1, 2))).difference, -1);
});

test("a run that is refused or lost is over; one that was over stays as it was", () => {
  const refused = new Run(1, "calm");
  refused.take({ id: 1, error: "frozen" });
  assert.deepEqual([refused.over, refused.error], [true, "frozen"]);
  const lost = run(part(words(1)), part(words(1)));
  lost.lose("lost");
  assert.deepEqual([lost.over, lost.error], [true, "lost"]);
  const over = run(part(words(1), { over: true }), part(words(1), { over: true }));
  over.lose("lost");
  assert.equal(over.error, "");
});

test("a text is split around the piece that holds a token", () => {
  const side = {
    pieces: [
      [[1], "a"],
      [[], "b"],
      [[2, 3], "c"],
      [[4], "d"],
    ],
  };
  assert.deepEqual(split(side, -1), ["abcd", null, ""]);
  assert.deepEqual(split(side, 0), ["", [[1], "a"], "bcd"]);
  assert.deepEqual(split(side, 1), ["ab", [[2, 3], "c"], "d"]);
  assert.deepEqual(split(side, 2), ["ab", [[2, 3], "c"], "d"]);
  assert.deepEqual(split(side, 3), ["abc", [[4], "d"], ""]);
  assert.deepEqual(split(side, 4), ["abcd", null, ""]);
  assert.deepEqual(split({ pieces: [] }, 0), ["", null, ""]);
});
