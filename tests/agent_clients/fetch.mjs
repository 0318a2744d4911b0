// fetch.mjs URL KEY: a program in Node without any client, by chat completions.
const [url, key] = process.argv.slice(2);
const digits = { a: "4", b: "9", c: "7" };
const parameters = { type: "object", properties: { key: { type: "string" } } };
const tools = [{ type: "function", function: { name: "look_up", parameters } }];

async function ask(messages, isStreamed) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify({ model: "policy", messages, tools, stream: isStreamed }),
  });
  if (!response.ok) throw new Error(await response.text());
  if (!isStreamed) return (await response.json()).choices[0].message;
  const message = { role: "assistant", content: "", tool_calls: [] };
  let unread = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (unread + piece).split("\n");
    unread = lines.pop();
    for (const line of lines.filter((it) => it.startsWith("data: {"))) {
      const delta = JSON.parse(line.slice(6)).choices[0]?.delta ?? {};
      message.content += delta.content ?? "";
      for (const { index, function: part, ...call } of delta.tool_calls ?? []) {
        const known = (message.tool_calls[index] ??= { function: { name: "", arguments: "" } });
        Object.assign(known, call);
        known.function.name += part?.name ?? "";
        known.function.arguments += part?.arguments ?? "";
      }
    }
  }
  if (!message.tool_calls.length) delete message.tool_calls;
  return message;
}

async function run(isStreamed) {
  const messages = [{ role: "user", content: "key c" }];
  for (;;) {
    const message = await ask(messages, isStreamed);
    if (!message.tool_calls) return { text: message.content };
    messages.push(message);
    for (const call of message.tool_calls) {
      const { key } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: digits[key] });
    }
  }
}

console.log(JSON.stringify([await run(false), await run(true)]));
