// Vercel's AI SDK with its providers for OpenAI and for servers like it.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "brigade",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const base = { model: provider("tiny-chat"), temperature: 0, maxOutputTokens: 40, maxRetries: 0 };
const prompt = "Say the alphabet.";

test("a stream adds up to the reply", async () => {
  const reply = await generateText({ ...base, prompt });
  assert.ok(reply.text.startsWith("a, b, c"));
  const stream = streamText({ ...base, prompt });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, reply.text);
  assert.equal((await stream.usage).outputTokens, reply.usage.outputTokens);
});

test("a required tool is called", async () => {
  const weather = tool({ description: "The weather.", inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }) });
  const options = { ...base, prompt, tools: { weather }, toolChoice: "required", maxOutputTokens: 100 };
  const reply = await generateText(options);
  assert.equal(reply.toolCalls[0].toolName, "weather");
  const stream = streamText(options);
  assert.deepEqual((await stream.toolCalls)[0].input, reply.toolCalls[0].input);
});

test("an answer follows its schema", async () => {
  const output = Output.object({ schema: z.object({ colour: z.enum(["red", "green"]) }) });
  const reply = await generateText({ ...base, maxOutputTokens: 200, prompt, output });
  assert.ok(["red", "green"].includes(reply.output.colour));
});

// Its own provider speaks Responses, and refers to earlier answers by their ids.
const responses = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none" });

test("a second turn refers to the stored response", async () => {
  const options = { ...base, model: responses("tiny-chat") };
  const messages = [{ role: "user", content: prompt }];
  const first = await generateText({ ...options, messages });
  assert.ok(first.text.startsWith("a, b, c"));
  messages.push(...first.response.messages, { role: "user", content: prompt });
  const second = await generateText({ ...options, messages });
  assert.deepEqual(second.request.body.input[1].type, "item_reference");
  assert.ok(second.usage.inputTokens > first.usage.inputTokens + first.usage.outputTokens);
  const whole = await generateText({ ...options, messages, providerOptions: { openai: { store: false } } });
  assert.equal(second.text, whole.text);
});
