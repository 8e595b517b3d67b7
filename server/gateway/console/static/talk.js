// One question to the model, as a stream of pieces with the weight version that wrote each.
//
//   {kind: "piece", text, version}                  {kind: "plain"}: no chat template, asked of /generate instead
//   {kind: "end", reason, tokens, spans, prompt}    `spans` and `prompt`: [{version, start, end}], token positions

import { ApiError } from "./api.js";
import { events } from "./sse.js";

const CHAT = "/v1/chat/completions";
const GENERATE = "/generate";

export class Talk {
  constructor(api) {
    this.api = api;
    this.model = null;
    this.plain = false; // the model has no chat template
  }

  async findModel() {
    const { data } = await this.api.json("/v1/models");
    this.model = data?.[0]?.id ?? null;
    return this.model;
  }

  async *ask(messages, options, signal) {
    if (!this.plain) {
      let answer = null;
      try {
        answer = await this.#post(CHAT, this.#chatBody(messages, options), signal);
      } catch (error) {
        if (!lacksTemplate(error)) throw error;
        this.plain = true;
        yield { kind: "plain" };
      }
      if (answer !== null) {
        yield* readChat(answer.body);
        return;
      }
    }
    const prompt = messages.at(-1).content;
    const answer = await this.#post(GENERATE, { prompt, ...this.#common(options) }, signal);
    yield* readGenerate(answer.body);
  }

  #post(path, body, signal) {
    return this.api.open(path, { method: "POST", body, signal });
  }

  #chatBody(messages, options) {
    return { messages, stream_options: { include_usage: true }, ...this.#common(options) };
  }

  #common({ maxTokens, temperature, policy, ignoreEos }) {
    const body = { stream: true, max_tokens: maxTokens, temperature };
    if (ignoreEos) body.ignore_eos = true;
    if (this.model !== null) body.model = this.model;
    if (policy !== "keep") body.hotswap = { policy };
    return body;
  }
}

function lacksTemplate(error) {
  return error instanceof ApiError && error.status === 400 && /chat.?template/i.test(error.message);
}

async function* readChat(body) {
  const end = { kind: "end", reason: null, tokens: null, spans: [], prompt: [] };
  for await (const { event, data } of events(body)) {
    if (data === "[DONE]") {
      yield end;
      return;
    }
    const chunk = checked(event, data);
    if (chunk.usage) end.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    take(end, choice);
    const text = `${choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? ""}${choice.delta?.content ?? ""}`;
    if (text) yield { kind: "piece", text, version: chunk.weight_version ?? null };
  }
  throw cutOff();
}

async function* readGenerate(body) {
  for await (const { event, data } of events(body)) {
    const told = checked(event, data);
    if (event === "token") yield { kind: "piece", text: told.text, version: told.weight_version ?? null };
    if (event !== "done") continue;
    const end = { kind: "end", reason: null, tokens: told.usage?.completion_tokens ?? null, spans: [], prompt: [] };
    take(end, told.choices?.[0] ?? {});
    yield end;
    return;
  }
  throw cutOff();
}

function take(end, choice) {
  end.reason = choice.finish_reason ?? end.reason;
  end.spans = choice.weight_versions ?? end.spans;
  end.prompt = choice.prompt_weight_versions ?? end.prompt;
}

function checked(event, data) {
  let told = null;
  try {
    told = JSON.parse(data);
  } catch {
    throw new ApiError("An event of the stream is not JSON.", { code: "not_json" });
  }
  if (event === "error" || told?.error) throw ApiError.from(told);
  return told;
}

function cutOff() {
  return new ApiError("The answer was cut off: the connection ended before it was complete.", { code: "incomplete" });
}
