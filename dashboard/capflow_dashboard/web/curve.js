// @ts-check
// Curve: what a probe's scores would fire at a threshold. Pure; it changes nothing.

/**
 * Return how many tokens have a score at or above a threshold. NaN, infinite and missing scores never fire.
 * @param {ArrayLike<number>} values
 * @param {number} count
 * @param {number} threshold
 */
export function tokensAt(values, count, threshold) {
  let fired = 0;
  for (let column = 0; column < count; column++) if (fires(values[column], threshold)) fired++;
  return fired;
}

/**
 * @param {number} value
 * @param {number} threshold
 */
export function fires(value, threshold) {
  return Number.isFinite(value) && value >= threshold;
}

/**
 * Return the request's score: what the probe's pooling makes of its tokens' scores; null without a score.
 * @param {ArrayLike<number>} values
 * @param {number} count
 * @param {string} pool token, mean, max or last
 */
export function pooled(values, count, pool) {
  let [sum, number, most, last] = [0, 0, -Infinity, NaN];
  for (let column = 0; column < count; column++) {
    const value = values[column];
    if (!Number.isFinite(value)) continue;
    sum += value;
    number++;
    most = Math.max(most, value);
    last = value;
  }
  if (!number) return null;
  return pool === "mean" ? sum / number : pool === "last" ? last : most;
}

/**
 * Return what would fire at a threshold, as text.
 * @param {ArrayLike<number>} values
 * @param {number} count
 * @param {number} threshold
 * @param {string} pool
 */
export function verdict(values, count, threshold, pool) {
  if (pool === "token") {
    const fired = tokensAt(values, count, threshold);
    return fired === 1 ? "1 token" : `${fired.toLocaleString("en")} tokens`;
  }
  const score = pooled(values, count, pool);
  return score === null ? "no score" : score >= threshold ? "fires" : "does not fire";
}
