// fetch.mjs URL KEY: a program in Node without any client, by chat completions.
const [url, key] = process.argv.slice(2);
const digits = { a: "4", b: "9", c: "7" };
const parameters = { type: "object", properties: { key: { type: "string" } } };
const streamed = { stream: true, stream_options: { include_usage: true } };
const tools = [{ type: "function", function: { name: "look_up", parameters } }];

async function ask(messages, isStreamed, texts) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify({ model: "policy", messages, tools, ...(isStreamed && streamed) }),
  });
  if (!response.ok) throw new Error(await response.text());
  if (!isStreamed) {
    const { choices, usage } = await response.json();
    return { message: choices[0].message, usage };
  }
  const message = { role: "assistant", content: "", tool_calls: [] };
  let usage;
  let unread = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (unread + piece).split("\n");
    unread = lines.pop();
    for (const line of lines.filter((it) => it.startsWith("data: {"))) {
      const chunk = JSON.parse(line.slice(6));
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta ?? {};
      message.content += delta.content ?? "";
      texts.push(delta.content ?? "");
      for (const { index, function: part, ...call } of delta.tool_calls ?? []) {
        const known = (message.tool_calls[index] ??= { function: { name: "", arguments: "" } });
        Object.assign(known, call);
        known.function.name += part?.name ?? "";
        known.function.arguments += part?.arguments ?? "";
      }
    }
  }
  if (!message.tool_calls.length) delete message.tool_calls;
  return { message, usage };
}

async function run(isStreamed) {
  const messages = [{ role: "user", content: "key c" }];
  const texts = [];
  for (;;) {
    const { message, usage } = await ask(messages, isStreamed, texts);
    if (!message.tool_calls)
      return {
        text: message.content,
        usage: [usage.prompt_tokens, usage.completion_tokens],
        texts,
      };
    messages.push(message);
    for (const call of message.tool_calls) {
      const { key } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: digits[key] });
    }
  }
}

console.log(JSON.stringify({ runs: [await run(false), await run(true)] }));
