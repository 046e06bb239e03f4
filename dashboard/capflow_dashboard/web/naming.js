// @ts-check
// Naming: the name of this page and the numbers of its actions, which outlive a reload.

const NAME = "capflow-page";
const NUMBER = "capflow-action";
const LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789";
const NAME_LENGTH = 8;
/** How long the page before a reload may take to let its name go. */
const WAIT_MS = 500;

/**
 * @typedef {Pick<Storage, "getItem" | "setItem">} Kept
 * @typedef {(bytes: Uint8Array<ArrayBuffer>) => Uint8Array<ArrayBuffer>} Random
 */

/**
 * Return the kept name, or a new one.
 * @param {Kept} storage
 * @param {Random} random fills bytes
 * @param {boolean} [anew] whether a kept name is not used
 */
export function pageName(storage, random, anew = false) {
  const kept = storage.getItem(NAME) ?? "";
  if (!anew && /^[a-z0-9]{8}$/.test(kept)) return kept;
  let name = "";
  while (name.length < NAME_LENGTH) {
    // 252 is the largest multiple of 36 in a byte, so that all letters are equally likely.
    for (const byte of random(new Uint8Array(NAME_LENGTH))) if (byte < 252) name += LETTERS[byte % LETTERS.length];
  }
  name = name.slice(0, NAME_LENGTH);
  storage.setItem(NAME, name);
  return name;
}

/**
 * Return a name that no other open page has: a tab that is duplicated has the same storage.
 * @param {Kept} storage
 * @param {Random} random
 * @param {LockManager | undefined} locks
 */
export async function claimName(storage, random, locks) {
  const name = pageName(storage, random);
  if (!locks || (await locked(locks, name))) return name;
  const other = pageName(storage, random, true);
  await locked(locks, other);
  return other;
}

/**
 * Return whether a name is this page's now; it is so until the page is closed.
 * @param {LockManager} locks
 * @param {string} name
 * @returns {Promise<boolean>}
 */
function locked(locks, name) {
  return new Promise((resolve) => {
    const granted = () => {
      resolve(true);
      return new Promise(() => {});
    };
    locks.request(`${NAME}-${name}`, { signal: AbortSignal.timeout(WAIT_MS) }, granted).catch(() => resolve(false));
  });
}

/**
 * Return the next number of an action: larger than all before it, also those before a reload.
 * @param {Kept} storage
 * @param {number} now ms since 1970
 */
export function nextNumber(storage, now) {
  const number = Math.max(Math.floor(now), (Number(storage.getItem(NUMBER)) || 0) + 1);
  storage.setItem(NUMBER, String(number));
  return number;
}
