// What steers a token: the events up to it, each in the slot that the engine keeps for it.

import assert from "node:assert/strict";
import { test } from "node:test";
import { acting, actingText } from "../../../dashboard/capflow_dashboard/web/acting.js";

const PAGE = "client";

/** An event as the server sends it: texts that are not given are empty. */
const event = (position, kind, more = {}) => ({
  id: `${position} ${kind}`,
  kind,
  by: PAGE,
  sites: [],
  step: position,
  position,
  time_s: 1,
  label: "",
  scale: null,
  score: null,
  threshold: null,
  target: "",
  outcome: "applied",
  reason: "",
  ...more,
});
const steer = (position, label, more = {}) => event(position, "steer", { label, scale: 1, ...more });
const gain = (position, target, scale, more = {}) => event(position, "gain", { target, scale, ...more });
const texts = (events, position) => acting(events, position).map(actingText);

test("an owner's second steer replaces its first, whatever the labels: a slider that moves is one steer", () => {
  const events = [steer(5, "calm +0.1"), steer(9, "calm +0.2"), steer(12, "joy +0.1")];
  assert.deepEqual(texts(events, 4), []);
  assert.deepEqual(texts(events, 8), ["calm +0.1 by client"]);
  assert.deepEqual(texts(events, 9), ["calm +0.2 by client"]);
  assert.deepEqual(texts(events, 40), ["joy +0.1 by client"]);
});

test("another owner's steer is one more, and each takes back its own", () => {
  const events = [
    steer(5, "a"),
    steer(6, "b", { by: "controller leash" }),
    event(9, "unsteer"),
    event(11, "unsteer", { by: "controller leash" }),
  ];
  assert.deepEqual(texts(events, 7), ["a by client", "b by controller leash"]);
  assert.deepEqual(texts(events, 9), ["b by controller leash"]);
  assert.deepEqual(texts(events, 11), []);
});

test("a target has one gain from outside and one of each controller; a gain of 1 is none", () => {
  const events = [
    gain(3, "module glad", 0.5),
    gain(4, "module glad", 0.25, { by: "dashboard" }),
    gain(5, "module glad", 0.75, { by: "controller c" }),
    gain(6, "module sad", 0),
    gain(8, "module glad", 1),
  ];
  assert.deepEqual(texts(events, 3), ["gain of module glad × 0.5 by client"]);
  assert.deepEqual(texts(events, 6), [
    "gain of module glad × 0.25 by dashboard",
    "gain of module glad × 0.75 by controller c",
    "gain of module sad × 0 by client",
  ]);
  assert.deepEqual(texts(events, 8), [
    "gain of module glad × 0.75 by controller c",
    "gain of module sad × 0 by client",
  ]);
});

test("a lease that ends takes the action of its label", () => {
  const events = [
    steer(5, "a #1"),
    gain(6, "module m", 0.5, { label: "m #2" }),
    event(20, "lease_end", { label: "m #2" }),
    event(30, "lease_end", { label: "a #1" }),
  ];
  assert.deepEqual(texts(events, 20), ["a #1 by client"]);
  assert.deepEqual(texts(events, 30), []);
});

test("a freeze takes all but what the request came with; after its end only later events act", () => {
  const events = [
    event(0, "steer", { by: "request", sites: ["post_block:3"] }),
    steer(5, "a"),
    gain(6, "module m", 0.5),
    event(9, "freeze", { by: "engine" }),
    event(15, "unfreeze", { by: "engine" }),
    steer(18, "b"),
  ];
  assert.deepEqual(texts(events, 8).length, 3);
  assert.deepEqual(texts(events, 16), ["its own steering at post_block:3"]);
  assert.deepEqual(texts(events, 18), ["its own steering at post_block:3", "b by client"]);
});

test("events count by position, not as they came; what was refused or has no position does not count", () => {
  const events = [event(9, "unsteer"), steer(5, "a"), steer(6, "no", { outcome: "rejected" }), steer(null, "lost")];
  assert.deepEqual(texts(events, 8), ["a by client"]);
  assert.deepEqual(texts(events, 9), []);
});

test("the words say what, how much, by whom and where", () => {
  const more = { label: "calm", scale: 2, sites: ["post_block:1", "post_block:2"] };
  assert.equal(actingText(event(1, "steer", more)), "calm × 2 by client at post_block:1, post_block:2");
  assert.equal(actingText(event(1, "steer", { by: "dashboard" })), "steer by dashboard");
});
