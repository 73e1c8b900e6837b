// The orchestrator's overview, once a second: as server-sent events, or by asking for it where
// something on the way holds events back. EventSource cannot send a token, so this reads the stream.

const FIRST_EVENT_MS = 5000;
const SILENT_MS = 8000;
const POLL_MS = 1000;
const POLLS_BEFORE_STREAM = 60;
const MAX_PAUSE_MS = 10000;

/** The token is missing or wrong; the message is the orchestrator's. */
export class Refused extends Error {}

/** The orchestrator answered, but with an error. */
class Problem extends Error {}

export class Feed {
  /**
   * @param report called with `{overview}`, `{refused}`, or `{lost, retryIn}`
   * @param token returns the token, "" for none
   */
  constructor(report, token) {
    this.report = report;
    this.token = token;
    this.since = 0;
    this.way = "events";
    this.polls = 0;
    this.failures = 0;
    this.running = null;
    this.wake = () => {};
  }

  start() {
    if (this.running) return;
    this.running = new AbortController();
    this.run(this.running);
  }

  stop() {
    this.running?.abort();
    this.running = null;
    this.wake();
  }

  /** Try again now. */
  retry() {
    this.wake();
  }

  async run(running) {
    while (!running.signal.aborted) {
      try {
        await (this.way === "events" ? this.stream(running.signal) : this.poll(running.signal));
      } catch (error) {
        if (running.signal.aborted) return;
        if (error instanceof Refused) {
          this.stop();
          this.report({ refused: error.message });
          return;
        }
        await this.fail(error);
      }
    }
  }

  async fail(error) {
    const pause = Math.min(1000 * 2 ** this.failures, MAX_PAUSE_MS);
    this.failures += 1;
    // It may have been down for the events as well: whether they pass is tried again.
    this.way = "events";
    const reason = error instanceof Problem ? error.message : "the orchestrator cannot be reached";
    this.report({ lost: reason, retryIn: pause / 1000 });
    await this.pause(pause);
  }

  take(overview) {
    this.failures = 0;
    for (const group of overview.groups) {
      this.since = Math.max(this.since, group.series.at(-1)?.at ?? 0);
    }
    this.report({ overview, way: this.way });
  }

  async stream(outer) {
    const control = new AbortController();
    const end = () => control.abort();
    outer.addEventListener("abort", end);
    let timer = setTimeout(end, FIRST_EVENT_MS);
    let seen = 0;
    try {
      const response = await this.get("v1/overview/events", control.signal);
      for await (const event of eventsOf(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(end, SILENT_MS);
        seen += 1;
        const data = JSON.parse(event.data);
        if (event.name === "problem") this.report({ lost: data.error.message, retryIn: 1 });
        else this.take(data);
      }
      if (!outer.aborted && seen) throw new Problem("the orchestrator has closed the connection");
    } catch (error) {
      if (error instanceof Refused || outer.aborted || seen) throw error;
    } finally {
      // However it ends: the orchestrator serves only so many streams at a time.
      control.abort();
      clearTimeout(timer);
      outer.removeEventListener("abort", end);
    }
    // Not one event came, so they may be held back on the way; whether it is that, asking shows.
    if (!outer.aborted) this.way = "polling";
  }

  async poll(signal) {
    const limited = AbortSignal.any([signal, AbortSignal.timeout(SILENT_MS)]);
    const response = await this.get("v1/overview", limited);
    this.take(await response.json());
    this.polls += 1;
    if (this.polls % POLLS_BEFORE_STREAM === 0) this.way = "events";
    await this.pause(POLL_MS);
  }

  async get(path, signal) {
    const token = this.token();
    const response = await fetch(`${path}?since=${this.since}`, {
      headers: token ? { Authorization: `Bearer ${token}` } : {},
      cache: "no-store",
      credentials: "same-origin",
      signal,
    });
    if (response.ok) return response;
    const message = await reasonOf(response);
    throw response.status === 401 ? new Refused(message) : new Problem(message);
  }

  pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the orchestrator, or what stands before it, answered ${response.status}`;
  }
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const event = { name: "message", data: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}
