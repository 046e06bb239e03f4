// @ts-check
// Feed: the session and the socket to the server. It reconnects by itself, says in which state it is, and notices when
// the server falls silent. It does not read messages; those go to `onMessage` as they are.

const WAIT_MS_MIN = 500;
const WAIT_MS_MAX = 5000;
/** The server sends a heartbeat each second; after this long without any message it is silent. */
const SILENT_MS = 3000;
const CHECK_MS = 250;

/**
 * @typedef {"connecting" | "open" | "silent" | "lost" | "ended" | "refused"} LinkState
 * @typedef {{onOpen: () => void, onMessage: (buffer: ArrayBuffer) => void,
 *   onState: (state: LinkState, why: string) => void}} Listener
 */

export class Feed {
  /** @param {Listener} listener */
  constructor(listener) {
    this.listener = listener;
    /** @type {LinkState} */
    this.state = "connecting";
    this.why = "";
    /** When the last message came, by `performance.now()`. */
    this.heardAt = 0;
    /** @type {WebSocket | null} */
    this.socket = null;
    this.waitMs = WAIT_MS_MIN;
    setInterval(() => this.listen(), CHECK_MS);
  }

  /** Exchange the token of the address for a cookie, then connect. */
  async start() {
    const token = /[#&]token=([^&]+)/.exec(location.hash)?.[1];
    if (token) history.replaceState(null, "", `${location.pathname}#/`);
    const admitted = await session(token);
    if (admitted === false) this.say("refused", token ? REFUSED_TOKEN : REFUSED);
    else this.connect();
  }

  connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/live`);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      this.socket = socket;
      this.heardAt = performance.now();
      this.say("open", "");
      this.listener.onOpen();
    };
    socket.onmessage = (event) => {
      this.heardAt = performance.now();
      this.waitMs = WAIT_MS_MIN;
      if (this.state === "silent") this.say("open", "");
      this.listener.onMessage(event.data);
    };
    socket.onclose = (event) => this.close(event);
  }

  /**
   * Send a message; return whether there is a connection.
   * @param {object} message
   */
  send(message) {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  listen() {
    const silentMs = performance.now() - this.heardAt;
    if (this.socket && silentMs > SILENT_MS) {
      this.say("silent", `The dashboard has sent nothing for ${Math.floor(silentMs / 1000)} s. What is shown is old.`);
    }
  }

  /** @param {CloseEvent} event */
  async close(event) {
    const ended = event.code === 1001 || (this.state === "ended" && !this.socket);
    this.socket = null;
    if (event.code === 1013) {
      this.say(
        "refused",
        `Too many pages are open${event.reason ? `: ${event.reason}` : ""}. Close one; this page tries again.`,
      );
    } else if (event.code === 1008) {
      this.say(
        "refused",
        `The dashboard closed the connection: ${event.reason || "invalid message"}. Reload the page.`,
      );
      return;
    } else if ((await session()) === false) {
      this.say("refused", REFUSED);
      return;
    } else {
      this.say(ended ? "ended" : "lost", ended ? ENDED : LOST);
    }
    setTimeout(() => this.connect(), this.waitMs);
    this.waitMs = Math.min(this.waitMs * 2, WAIT_MS_MAX);
  }

  /**
   * @param {LinkState} state
   * @param {string} why
   */
  say(state, why) {
    if (state === this.state && why === this.why) return;
    [this.state, this.why] = [state, why];
    this.listener.onState(state, why);
  }
}

const REFUSED = "This browser is not admitted. Open the link that capflow prints when it starts.";
const REFUSED_TOKEN =
  "The link is old: capflow has another token now. Open the link that capflow prints when it starts.";
const ENDED = "capflow has stopped. This is its last state. The page reconnects when capflow returns.";
const LOST = "The connection to capflow is lost. This is its last state. The page is reconnecting.";

/**
 * Return whether the server admits this browser; null if it does not answer.
 * @param {string} [token]
 */
async function session(token) {
  try {
    const headers = token ? { Authorization: `Bearer ${decodeURIComponent(token)}` } : undefined;
    const answer = await fetch("/session", { cache: "no-store", headers });
    return answer.ok ? true : answer.status === 403 ? false : null;
  } catch {
    return null;
  }
}
