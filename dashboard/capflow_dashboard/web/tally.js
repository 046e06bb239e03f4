// @ts-check
// Tally: what a population says at a threshold. Pure.
//
// A threshold is an edge of the bins, so its counts are exact: bin 0 is below the first edge, the last above the last.

/** @typedef {import("./protocol.js").Population} Population */

/**
 * Return how many are in the bins at or above an edge.
 * @param {number[]} counts
 * @param {number} edge
 */
export function above(counts, edge) {
  let sum = 0;
  for (let bin = edge + 1; bin < counts.length; bin++) sum += counts[bin];
  return sum;
}

/** @param {number[]} counts */
export function total(counts) {
  return counts.reduce((sum, value) => sum + value, 0);
}

/**
 * Return the edge that is nearest to a score.
 * @param {number[]} edges
 * @param {number} score
 */
export function nearest(edges, score) {
  const width = edges[1] - edges[0];
  return Math.max(0, Math.min(edges.length - 1, Math.round((score - edges[0]) / width)));
}

/**
 * Return what fires at an edge: tokens, requests, and of labelled requests the four outcomes.
 * @param {Population} population
 * @param {number} edge
 */
export function outcome({ tokens, requests }, edge) {
  const [, negative, positive] = requests;
  const [falsePositives, truePositives] = [above(negative, edge), above(positive, edge)];
  const fired = falsePositives + truePositives;
  return {
    tokens: above(tokens, edge),
    ofTokens: total(tokens),
    requests: requests.reduce((sum, counts) => sum + above(counts, edge), 0),
    ofRequests: requests.reduce((sum, counts) => sum + total(counts), 0),
    truePositives,
    falsePositives,
    falseNegatives: total(positive) - truePositives,
    trueNegatives: total(negative) - falsePositives,
    precision: fired ? truePositives / fired : null,
    recall: total(positive) ? truePositives / total(positive) : null,
  };
}

/**
 * Return a part as a percentage with enough digits to differ from 0 and 100.
 * @param {number} part
 * @param {number} whole
 */
export function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  const near = Math.min(share, 100 - share);
  return `${near === 0 ? share : share.toFixed(near < 0.1 ? 3 : near < 1 ? 2 : near < 10 ? 1 : 0)} %`;
}

/**
 * Return how many of what was counted fired, per second or minute: null where nothing was counted.
 * @param {[number, number][]} counts
 */
export function shares(counts) {
  return counts.map(([counted, fired]) => (counted ? (100 * fired) / counted : null));
}
