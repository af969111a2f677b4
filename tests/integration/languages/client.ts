// Streams one greedy chat. It is compiled with what ts-proto generates, never run.

import { credentials } from "@grpc/grpc-js";
import { GenerateRequest, type GenerateResponse, Role, TokenizerServiceClient } from "./lockstep/v1/tokenizer.js";

const client = new TokenizerServiceClient("127.0.0.1:50051", credentials.createInsecure());
const request = GenerateRequest.fromPartial({
  chat: { messages: [{ role: Role.ROLE_USER, content: "Why is the sky blue?" }] },
  sampling: { temperature: 0, maxTokens: 100 },
});
const stream = client.generate(request);
stream.on("data", (response: GenerateResponse) => process.stdout.write(response.text));
stream.on("end", () => client.close());
