// Page: which request is shown, by the address, what is kept and what was chosen.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

globalThis.location = { hash: "#/" };
globalThis.history = {
  replaceState: (_, __, address) => Object.assign(location, { hash: address }),
  pushState: (_, __, address) => Object.assign(location, { hash: address }),
};

const { Page } = await import("../../../dashboard/capflow_dashboard/web/page.js");

const NUMBERS = new Float32Array(0);

let page;

/** Let requests come, each with its key, its id and its engine. */
function come(...requests) {
  const whole = requests.map(([key, id, engine = "e"]) => ({ key, id, engine, status: "stop" }));
  page.store.take({ requests: whole }, NUMBERS);
  page.resolve();
}

function visit(address) {
  location.hash = address;
  page.visit();
}

beforeEach(() => {
  location.hash = "#/";
  page = new Page({ draw() {}, add() {} });
});

test("the newest is followed until one is chosen", () => {
  come([1, "a"]);
  come([2, "b"]);
  assert.equal(page.key, 2);
  page.open(1);
  come([3, "c"]);
  assert.equal(page.key, 1);
  assert.match(location.hash, /a\?hold=1$/);
});

test("a link to a request works after the chosen one is gone", () => {
  come([1, "a"], [2, "b"]);
  page.open(1);
  visit("#/alerts?hold=1");
  page.store.take({ gone: [1] }, NUMBERS);
  visit("#/r/e/b?hold=1");
  assert.equal(page.key, 2);
});

test("a chosen request that is gone is found when it comes again", () => {
  come([1, "a"], [2, "b"]);
  page.open(1);
  page.store.take({ gone: [1] }, NUMBERS);
  page.resolve();
  assert.equal(page.request, undefined);
  come([7, "a"]);
  assert.equal(page.key, 7);
});

test("the address of a view without a request leads back to the chosen request, or to the newest", () => {
  come([1, "a"], [2, "b"]);
  page.open(1);
  page.view("population");
  page.go({ engine: "other", id: "" });
  page.view("request");
  assert.deepEqual([page.key, page.place.engine, page.place.id], [1, "e", "a"]);
  page.view("health");
  visit(location.hash);
  page.view("request");
  assert.equal(page.key, 1);
});

test("a page that was opened with another view shows the newest request", () => {
  visit("#/health?hold=1");
  come([1, "a"], [2, "b"]);
  page.view("request");
  assert.equal(page.key, 2);
});

test("requests with one id are compared as they were chosen", () => {
  come([1, "a"], [9, "a"]);
  page.compare(1, 9);
  assert.deepEqual([page.key, page.otherKey], [1, 9]);
  page.resolve();
  assert.deepEqual([page.key, page.otherKey], [1, 9]);
  visit(location.hash);
  assert.deepEqual([page.key, page.otherKey], [1, 9]);
});

test("a key that is held does not change the address more often than browsers allow, and what is shown is in it at last", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1e12 });
  let changes = 0;
  t.mock.method(history, "replaceState", (_, __, address) => {
    changes += 1;
    location.hash = address;
  });
  for (let pos = 0; pos < 300; pos++) {
    page.go({ pos });
    t.mock.timers.tick(1000 / 30);
  }
  assert.ok(changes <= 10 * 5, `${changes} in 10 s`);
  t.mock.timers.tick(1000);
  assert.match(location.hash, /pos=299$/);
});

test("an entry of the browser's history keeps what was shown last before it", (t) => {
  const addresses = [];
  for (const name of ["replaceState", "pushState"])
    t.mock.method(history, name, (_, __, address) => {
      addresses.push(address);
      location.hash = address;
    });
  page.go({ pos: 7 });
  page.go({ view: "health" }, true);
  assert.deepEqual(addresses, ["#/?pos=7", "#/health?pos=7"]);
});

test("an address that someone opened is not written over by what was shown before it", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1e12 });
  page.go({ pos: 1 });
  page.go({ pos: 2 });
  // The browser tells of it later.
  location.hash = "#/health";
  t.mock.timers.tick(1000);
  assert.equal(location.hash, "#/health");
  page.visit();
  assert.equal(page.place.view, "health");
  page.go({ probe: "a" });
  t.mock.timers.tick(1000);
  assert.equal(location.hash, "#/health?probe=a");
});
