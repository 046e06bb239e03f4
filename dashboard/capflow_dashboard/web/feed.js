// The feed: the socket to the server. It reconnects automatically and reports its state.

const WAIT_MS_MIN = 500;
const WAIT_MS_MAX = 5000;

/** Return the head and the numbers of a message; the server's module `wire` defines the format. */
export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { head, numbers: new Float32Array(buffer, 4 + length) };
}

export class Feed {
  /**
   * onOpen(): there is a new connection; the server sends everything again.
   * onMessage({head, numbers}): a message has arrived.
   * onState(state, why): the state is live, lost, ended or refused.
   */
  constructor({ onOpen, onMessage, onState }) {
    this.onOpen = onOpen;
    this.onMessage = onMessage;
    this.onState = onState;
    this.wait = WAIT_MS_MIN;
    this.socket = null;
    // Whether the server has announced its end.
    this.ended = false;
    this.connect();
  }

  connect() {
    const socket = new WebSocket(`ws://${location.host}/live${location.search}`);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      this.socket = socket;
      this.wait = WAIT_MS_MIN;
      this.ended = false;
      this.onState("live", "");
      this.onOpen();
    };
    socket.onmessage = (event) => this.onMessage(decode(event.data));
    socket.onclose = (event) => this.lost(event);
  }

  select(key) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ select: key }));
  }

  async lost(event) {
    this.socket = null;
    this.ended ||= event.code === 1001;
    if (event.code === 1013) {
      this.onState("refused", `${event.reason}; close one and reload this page.`);
      return;
    }
    if (await this.isShutOut()) {
      this.onState("refused", "capflow was restarted with a new token. Open the address that it prints.");
      return;
    }
    this.onState(
      this.ended ? "ended" : "lost",
      this.ended
        ? "capflow has stopped. This is its last state. The page reconnects when capflow returns with the same token."
        : "The connection to capflow is lost. This is its last state. The page is reconnecting.",
    );
    setTimeout(() => this.connect(), this.wait);
    this.wait = Math.min(this.wait * 2, WAIT_MS_MAX);
  }

  /** Return whether a server answers and refuses this page's token. */
  async isShutOut() {
    try {
      return (await fetch(location.href, { cache: "no-store" })).status === 403;
    } catch {
      return false;
    }
  }
}
