// A reader of event streams: https://html.spec.whatwg.org/multipage/server-sent-events.html

const LINE = /\r\n|\n|\r/;

/**
 * The events of a ReadableStream of bytes, as { name, data }, in whatever pieces they come. An event that is cut off by
 * the end is none.
 */
export async function* events(stream) {
  let name = "";
  let data = [];
  for await (const line of lines(stream)) {
    if (line === "") {
      if (data.length) yield { name: name || "message", data: data.join("\n") };
      name = "";
      data = [];
      continue;
    }
    const [field, value] = parted(line);
    if (field === "data") data.push(value);
    else if (field === "event") name = value;
  }
}

async function* lines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // a line without an end is none
      rest += decoder.decode(value, { stream: true });
      const held = rest.endsWith("\r") ? "\r" : ""; // its line feed may be on its way
      const parts = rest.slice(0, rest.length - held.length).split(LINE);
      rest = parts.pop() + held;
      yield* parts;
    }
  } finally {
    await reader.cancel().catch(() => {}); // left early: nobody needs the rest
  }
}

function parted(line) {
  const colon = line.indexOf(":");
  if (colon < 0) return [line, ""];
  return [line.slice(0, colon), line.slice(colon + 1).replace(/^ /, "")];
}
