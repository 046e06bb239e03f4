// The lens: which answer is shown, and where the first token changes.

import assert from "node:assert/strict";
import { test } from "node:test";
import { changes, Lens, percentText } from "../../../dashboard/capflow_dashboard/web/lens.js";

const layer = (number, id) => ({ layer: number, site: `post_block:${number}`, tokens: [[id, "x", 0.5]] });

test("the last layer comes first, and layers whose first token is another one are marked", () => {
  const rows = changes([layer(0, 1), layer(2, 2), layer(1, 1), layer(3, 2)]);
  assert.deepEqual(
    rows.map((row) => [row.layer.layer, row.changed]),
    [
      [3, false],
      [2, true],
      [1, false],
      [0, false],
    ],
  );
  assert.deepEqual(changes([]), []);
  const gap = [layer(0, 1), { ...layer(1, 1), tokens: [] }, layer(2, 1), layer(3, 2)];
  assert.deepEqual(
    changes(gap).map((row) => row.changed),
    [true, false, false, false],
  );
});

test("only the answer to the last question is shown, and a lost connection is said", () => {
  const sent = [];
  let open = true;
  const lens = new Lens(
    (message) => open && sent.push(message) > 0,
    () => {},
  );
  lens.ask(3, 7);
  lens.ask(3, 8);
  assert.deepEqual(sent.at(-1), { lens: { id: 2, request: 3, position: 8 } });
  lens.take({ id: 1, request: 3, position: 7, layers: [], error: "" });
  assert.equal(lens.shown.answer, null);
  lens.take({ id: 2, request: 3, position: 8, layers: [layer(0, 1)], error: "" });
  assert.equal(lens.shown.answer.layers.length, 1);
  open = false;
  lens.ask(3, 9);
  assert.match(lens.shown.answer.error, /no connection/);
  lens.clear();
  assert.equal(lens.shown, null);
});

test("probabilities are short", () => {
  assert.deepEqual([1, 0.4567, 0.0123, 0.0001, 0].map(percentText), ["100 %", "46 %", "1.2 %", "< 0.1 %", "< 0.1 %"]);
});
