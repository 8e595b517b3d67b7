// Requests to the gateway this page came from, and its typed errors.

export class ApiError extends Error {
  constructor(message, { status = 0, code = "unreachable", type = "", retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, type, retryAfter });
  }

  // One line that says what went wrong and by which name the gateway knows it.
  get line() {
    const later = this.retryAfter === null ? "" : ` Try again in ${this.retryAfter} s.`;
    return `${this.message}${later} [${this.status ? `${this.status} ` : ""}${this.code}]`;
  }

  // From `{"error": {...}}`, in a body or in an event of a stream.
  static from(payload, status = 0, retryAfter = null) {
    const error = payload?.error ?? {};
    const code = error.code === null || error.code === undefined ? error.type : error.code;
    return new ApiError(String(error.message ?? "The gateway failed without saying why."), {
      status,
      code: String(code ?? "unknown"),
      type: String(error.type ?? ""),
      retryAfter,
    });
  }
}

export class Api {
  // `scoped`: the beginning of the routes that are asked about one of several models.
  constructor(key, scoped = "") {
    this.key = key;
    this.scoped = scoped;
    this.model = null; // which one; null: there is but one
  }

  async json(path, { method = "GET", body, signal } = {}) {
    const answer = await this.open(path, { method, body, signal });
    return parsed(await answer.text(), answer.status);
  }

  // The answer itself, for a stream. Throws ApiError for whatever is not a success.
  async open(path, { method = "GET", body, signal } = {}) {
    const headers = new Headers({ accept: "application/json, text/event-stream" });
    if (this.key.value) headers.set("authorization", `Bearer ${this.key.value}`);
    if (body !== undefined) headers.set("content-type", "application/json");
    const answer = await reached(this.#about(path), {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }

  #about(path) {
    if (this.model === null || !path.startsWith(this.scoped)) return path;
    return `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(this.model)}`;
  }
}

async function reached(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.message.includes("ByteString") || error.message.includes("header")) {
      throw new ApiError("The key has characters that no key has; type it again.", { code: "bad_key" });
    }
    throw new ApiError("The gateway does not answer.");
  }
}

async function refusal(answer) {
  const later = Number.parseInt(answer.headers.get("retry-after") ?? "", 10);
  const text = await answer.text();
  let payload = null;
  try {
    payload = JSON.parse(text);
  } catch {
    payload = { error: { message: text.slice(0, 300) || answer.statusText, code: "not_json" } };
  }
  return ApiError.from(payload, answer.status, Number.isNaN(later) ? null : later);
}

function parsed(text, status) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError("The gateway's answer is not JSON.", { status, code: "not_json" });
  }
}
