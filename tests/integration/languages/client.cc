// Makes a request and reads a response. It is compiled with what protoc generates, never run.

#include <iostream>

#include "lockstep/v1/scheduler.pb.h"
#include "lockstep/v1/tokenizer.pb.h"

int main() {
  lockstep::v1::GenerateRequest request;
  lockstep::v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role(lockstep::v1::ROLE_USER);
  message->set_content("Why is the sky blue?");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(100);
  std::cout << request.SerializeAsString();

  lockstep::v1::GenerateResponse response;
  if (!response.ParseFromIstream(&std::cin)) return 1;
  std::cout << response.text();
  if (response.finish().reason() == lockstep::v1::FINISH_REASON_MAX_TOKENS) std::cout << "...";
}
