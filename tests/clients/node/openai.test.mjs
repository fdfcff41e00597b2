// OpenAI's own client for Node: chats, streams, tools, structured output, errors, cancellation.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: "Say the alphabet." }];
const base = { model: "tiny-chat", messages, temperature: 0, max_tokens: 40 };

test("a stream adds up to the reply", async () => {
  const reply = await client.chat.completions.create(base);
  assert.ok(reply.choices[0].message.content.startsWith("a, b, c"));
  const stream = client.chat.completions.stream(base);
  const whole = await stream.finalChatCompletion();
  assert.equal(whole.choices[0].message.content, reply.choices[0].message.content);
});

test("usage comes last in a stream", async () => {
  const options = { include_usage: true };
  const stream = await client.chat.completions.create({ ...base, stream: true, stream_options: options });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

test("a required tool is called", async () => {
  const parameters = { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const reply = await client.chat.completions.create({ ...base, tools, tool_choice: "required", max_tokens: 100 });
  const { name, arguments: given } = reply.choices[0].message.tool_calls[0].function;
  assert.equal(name, "weather");
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(given).city));
});

test("an answer follows its schema", async () => {
  const schema = { type: "object", properties: { n: { enum: [1, 2] } }, required: ["n"], additionalProperties: false };
  const response_format = { type: "json_schema", json_schema: { name: "number", schema } };
  const reply = await client.chat.completions.create({ ...base, response_format });
  assert.ok([1, 2].includes(JSON.parse(reply.choices[0].message.content).n));
});

test("errors have the classes of the client", async () => {
  await assert.rejects(client.chat.completions.create({ ...base, model: "absent" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...base, top_p: 7 }), OpenAI.BadRequestError);
});

test("a client can leave a stream", async () => {
  const stream = await client.chat.completions.create({ ...base, stream: true, max_tokens: 500, ignore_eos: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    stream.controller.abort();
    break;
  }
});

test("completions are limited and models listed", async () => {
  const reply = await client.completions.create({ model: "tiny-chat", prompt: "the cat", max_tokens: 3 });
  assert.ok(reply.usage.completion_tokens <= 3);
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["tiny-chat"]);
});

test("a streamed response equals the whole one", async () => {
  const asked = { model: "tiny-chat", input: "Say the alphabet.", temperature: 0, max_output_tokens: 40 };
  const reply = await client.responses.create(asked);
  assert.ok(reply.output_text.startsWith("a, b, c"));
  const whole = await client.responses.stream({ ...asked, store: false }).finalResponse();
  assert.equal(whole.output[0].content[0].text, reply.output_text);
  const next = await client.responses.create({ ...asked, previous_response_id: reply.id });
  assert.ok(next.usage.input_tokens > reply.usage.input_tokens);
});
