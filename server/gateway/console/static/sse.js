// Server-sent events out of a response body (https://html.spec.whatwg.org/multipage/server-sent-events.html).
// EventSource cannot send a body or a key, so the stream is read here.

import { ApiError } from "./api.js";

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const lines = new Lines();
  let event = "message";
  let data = [];
  try {
    while (true) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      for (const line of lines.feed(value)) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
          continue;
        }
        const [name, text] = field(line);
        if (name === "data") data.push(text);
        else if (name === "event") event = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // who stops early ends the request
  }
}

// A connection that broke, unless it was we who ended it.
function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError("The answer was cut off: the connection broke.", { code: "incomplete" });
}

function field(line) {
  const colon = line.indexOf(":");
  if (colon < 0) return [line, ""];
  const text = line.slice(colon + 1);
  return [line.slice(0, colon), text.startsWith(" ") ? text.slice(1) : text];
}

// Complete lines, ended by CR, LF or both, however they are cut into pieces.
class Lines {
  #rest = "";
  #afterReturn = false;

  feed(piece) {
    let text = this.#rest + (this.#afterReturn && piece.startsWith("\n") ? piece.slice(1) : piece);
    this.#afterReturn = piece === "" ? this.#afterReturn : piece.endsWith("\r");
    const found = text.split(/\r\n|\n|\r/);
    this.#rest = found.pop();
    return found;
  }
}
