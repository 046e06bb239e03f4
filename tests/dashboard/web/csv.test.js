// The CSV file of the list: quoting, formulas, and the columns of the server's file.

import assert from "node:assert/strict";
import test from "node:test";
import { cell, listCsv } from "../../../dashboard/capflow_dashboard/web/csv.js";

test("a cell is quoted when it must be", () => {
  assert.equal(cell("plain"), "plain");
  assert.equal(cell('say "hi", twice'), '"say ""hi"", twice"');
  assert.equal(cell("a\nb"), '"a\nb"');
  assert.equal(cell("é😀"), "é😀");
});

test("no text is a formula", () => {
  for (const text of ["=1", "+1", "-1", "@x", "\tx", "\r=1", "  =1", "＝1", "\n=1"]) {
    assert.match(cell(text), /^"?'/);
  }
  assert.equal(cell("1-2"), "1-2");
});

test("requests keep their order, and a probe that an engine lacks is empty", () => {
  const request = (id, engine, probes) => ({
    id,
    engine,
    status: "stop",
    prompt_length: 4,
    tokens: 6,
    started_s: 0.5,
    ended_s: null,
    rows_lost: 0,
    steered: 2,
    text: "a,b",
    probes,
  });
  const store = {
    requests: new Map([
      [1, request("r1", "one", { code: [2.5, -1, null, 3] })],
      [2, request("=r2", "two", {})],
    ]),
    probeNames: ["code"],
    number: (one, name) => one.probes[name] ?? null,
  };
  assert.deepEqual(listCsv(store, [2, 1, 9]).split("\r\n"), [
    "id,engine,status,prompt_tokens,tokens,started,ended,lost_rows,steered,text,code max,code mean,code last,code fired",
    `'=r2,two,stop,4,6,1970-01-01T00:00:00.500+00:00,,0,2,"a,b",,,,`,
    `r1,one,stop,4,6,1970-01-01T00:00:00.500+00:00,,0,2,"a,b",2.5,-1,,3`,
    "",
  ]);
});
