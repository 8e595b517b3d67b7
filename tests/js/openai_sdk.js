// What the OpenAI JavaScript SDK makes of this server: node openai_sdk.js BASE_URL MODEL answers|errors|cut
// `answers` and `errors` print one JSON object. `cut` prints a line when its stream runs, and the error that ends it.
import OpenAI from "openai";

const [baseURL, model, what] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const say = (value) => console.log(JSON.stringify(value));

async function collect(stream) {
  const found = [];
  for await (const chunk of stream) found.push(chunk);
  return found;
}

async function failure(call) {
  try {
    return { answer: await call() };
  } catch (error) {
    const { status, code, type, message } = error;
    return { name: error.constructor.name, typed: error instanceof OpenAI.APIError, status, code, type, message };
  }
}

async function answers() {
  const short = { model, max_tokens: 5, temperature: 0, ignore_eos: true };
  const { data, response } = await client.chat.completions.create({ ...short, messages }).withResponse();
  const ask = { model, input: "hi", max_output_tokens: 5, temperature: 0 };
  say({
    header: response.headers.get("x-hotswap-weight-version"),
    chat: data,
    chatStream: await collect(await client.chat.completions.create({ ...short, messages, stream: true })),
    completion: await client.completions.create({ ...short, prompt: "3+4=" }),
    completionStream: await collect(await client.completions.create({ ...short, prompt: "3+4=", stream: true })),
    response: await client.responses.create(ask),
    responseStream: await collect(await client.responses.create({ ...ask, stream: true })),
    withField: await client.chat.completions.create({ ...short, messages, hotswap: { policy: "finish" } }),
  });
}

async function errors() {
  const chat = (more, options) => () => client.chat.completions.create({ model, messages, ...more }, options);
  const exact = { headers: { "x-hotswap-version": "999999" } };
  say({
    header: await failure(chat({}, exact)),
    field: await failure(chat({ hotswap: { min_version: 999999 } })),
    waited: await failure(chat({ hotswap: { version: 999999, wait_s: 0.2 } })),
    stream: await failure(chat({ stream: true }, exact)),
    responses: await failure(() => client.responses.create({ model, input: "hi" }, exact)),
    policy: await failure(chat({ hotswap: { policy: "never" } })),
    model: await failure(chat({ model: "nobody" })),
  });
}

async function cut() {
  let chunks = 0;
  const error = await failure(async () => {
    const more = { max_tokens: 900, temperature: 0, ignore_eos: true, stream: true };
    const headers = { "x-hotswap-policy": "abort" };
    for await (const chunk of await client.chat.completions.create({ model, messages, ...more }, { headers })) {
      if (chunk.choices[0]?.delta.content && chunks++ === 0) say("streams");
    }
    return "the whole answer";
  });
  say({ error, chunks });
}

await { answers, errors, cut }[what]();
