// The JavaScript clients of test_clients_swapped_live.py: node program.js CLIENT URL MODEL. As program.py: each way is asked again and
// again until standard input ends; then one line says what came of it.
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import OpenAI from "openai";

const TOKENS = 48;
const QUESTION = "What is 2 + 2?";
const messages = [{ role: "user", content: QUESTION }];
const VERDICT = {
  type: "object",
  properties: { verdict: { type: "string", enum: ["yes", "no"] } },
  required: ["verdict"],
  additionalProperties: false,
};

async function last(events) {
  let found;
  for await (const event of events) found = event;
  return found;
}

const clients = {
  openai(url, model) {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
    const ask = { model, messages, max_tokens: TOKENS };
    const judge = { type: "function", function: { name: "judge", description: "Judges.", parameters: VERDICT } };
    return {
      chat: async () => (await client.chat.completions.create(ask)).choices[0],
      stream: async () => last(await client.chat.completions.create({ ...ask, stream: true })),
      completion: async () => (await client.completions.create({ model, prompt: QUESTION, max_tokens: TOKENS })).choices[0],
      response: async () => (await client.responses.create({ model, input: QUESTION, max_output_tokens: TOKENS })).id,
      responseStream: async () =>
        last(await client.responses.create({ model, input: QUESTION, max_output_tokens: TOKENS, stream: true })),
      tool: async () =>
        (
          await client.chat.completions.create({
            ...ask,
            tools: [judge],
            tool_choice: { type: "function", function: { name: "judge" } },
          })
        ).choices[0].message,
    };
  },
  anthropic(url, model) {
    const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
    const ask = { model, messages, max_tokens: TOKENS };
    return {
      message: async () => (await client.messages.create(ask)).stop_reason,
      stream: async () => last(await client.messages.create({ ...ask, stream: true })),
      count: async () => (await client.messages.countTokens({ model, messages })).input_tokens,
    };
  },
  vercel(url, model) {
    const provider = createOpenAICompatible({ name: "hotswap", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
    const ask = { model: provider(model), prompt: QUESTION, maxOutputTokens: TOKENS, maxRetries: 0 };
    const judge = tool({ description: "Judges.", inputSchema: jsonSchema(VERDICT) });
    return {
      text: async () => (await generateText(ask)).finishReason,
      stream: async () => {
        let broken;
        const answer = streamText({ ...ask, onError: ({ error }) => (broken = error) });
        await last(answer.textStream);
        if (broken) throw broken;
        return answer.finishReason;
      },
      structured: async () =>
        (await generateText({ ...ask, output: Output.object({ schema: jsonSchema(VERDICT) }) })).output.verdict,
      tool: async () => (await generateText({ ...ask, tools: { judge }, toolChoice: "auto" })).finishReason,
    };
  },
};

const [client, url, model] = process.argv.slice(2);
const ways = clients[client](url, model);
const asked = {};
const failures = [];
let over = false;
let begun;
const first = new Promise((resolve) => (begun = resolve));

async function askOn(name) {
  while (!over) {
    try {
      if ((await ways[name]()) === undefined) throw new Error("no answer");
      asked[name] = (asked[name] ?? 0) + 1;
    } catch (failure) {
      failures.push(`${name}: ${failure.name}: ${failure.message}`);
      begun();
      return;
    }
    begun();
  }
}

const running = Object.keys(ways).map(askOn);
await first;
console.log("asking");
await last(process.stdin);
over = true;
await Promise.all(running);
console.log(JSON.stringify({ asked, failures, ways: Object.keys(ways) }));
