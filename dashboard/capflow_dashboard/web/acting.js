// @ts-check
// Acting: what steers a position, by the events of its request. Pure.

import { number, visible } from "./format.js";

/** @typedef {import("./protocol.js").SteeringEvent} SteeringEvent */

/**
 * Return the events whose steering holds at a position, as the engine counts them: an owner has one `steer`, which its
 * next one replaces; a target has one gain, and one more of each controller.
 * @param {SteeringEvent[]} events
 * @param {number} position
 */
export function acting(events, position) {
  /** @type {Map<string, SteeringEvent>} */
  const held = new Map();
  for (const event of inOrder(events)) {
    if (event.outcome !== "applied" || event.position === null || event.position > position) continue;
    const by = event.by ?? "";
    switch (event.kind) {
      case "steer":
        held.set(`steer ${by}`, event);
        break;
      case "gain": {
        const slot = `gain ${by.startsWith("controller ") ? by : ""} of ${event.target}`;
        if (event.scale === 1) held.delete(slot);
        else held.set(slot, event);
        break;
      }
      case "unsteer":
        held.delete(`steer ${by}`);
        break;
      case "lease_end":
        for (const [slot, one] of held)
          if ((one.by ?? "") === by && (one.label ?? "") === (event.label ?? "")) held.delete(slot);
        break;
      case "freeze":
        for (const [slot, one] of held) if (one.by !== "request") held.delete(slot);
    }
  }
  return [...held.values()];
}

/**
 * Return events by position; those of one position as they came. Workers and hubs tell theirs on ways of their own.
 * @param {SteeringEvent[]} events
 */
function inOrder(events) {
  return [...events].sort((one, other) => (one.position ?? -1) - (other.position ?? -1));
}

/**
 * Return in words what acts, how much, by whom and where.
 * @param {SteeringEvent} event
 */
export function actingText({ kind, label, target, scale, by, sites }) {
  const what = label || (kind === "gain" ? `gain of ${target}` : by === "request" ? "its own steering" : kind);
  const times = scale === null || scale === 1 ? "" : ` × ${number(scale)}`;
  const who = by && by !== "request" ? ` by ${visible(by)}` : "";
  return `${visible(what)}${times}${who}${sites?.length ? ` at ${sites.join(", ")}` : ""}`;
}
