// Streams one greedy chat and prints each response as a line of JSON.
//
// node chat.js ADDRESS PROTO_ROOT QUESTION MAX_TOKENS

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address, protoRoot, question, maxTokens] = process.argv.slice(2);
const definition = protoLoader.loadSync("lockstep/v1/tokenizer.proto", {
  includeDirs: [protoRoot],
  longs: String,
  enums: String,
});
const { lockstep } = grpc.loadPackageDefinition(definition);
const client = new lockstep.v1.TokenizerService(address, grpc.credentials.createInsecure());

const stream = client.generate({
  chat: { messages: [{ role: "ROLE_USER", content: question }] },
  sampling: { temperature: 0, maxTokens: Number(maxTokens) },
});
stream.on("data", (response) => console.log(JSON.stringify(response)));
stream.on("error", (error) => {
  console.error(`error: ${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on("end", () => client.close());
