// Server-sent events over fetch, which can send an admin key; begins anew when the connection ends.

export const key = {
  get: () => sessionStorage.getItem("pagedkv-admin-key") || "",
  set: (text) => sessionStorage.setItem("pagedkv-admin-key", text),
};

export const headers = () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {});

export async function listen(handlers) {
  for (;;) {
    try {
      const answer = await fetch("/v1/pool/stream", { headers: headers() });
      if (answer.status === 403 || answer.status === 401) {
        handlers.refused();
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      await read(answer.body.getReader(), handlers);
    } catch (error) {
      handlers.lost(String(error));
    }
    await new Promise((later) => setTimeout(later, 1500));
  }
}

async function read(reader, handlers) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server has ended the stream");
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [kind, data] = part.split("\n");
      handlers[kind.slice("event: ".length)]?.(JSON.parse(data.slice("data: ".length)));
    }
  }
}
