// Package client streams one greedy chat. It is compiled with what protoc generates, never run.
package client

import (
	"context"
	"fmt"

	lockstepv1 "client/lockstep/v1"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Ask prints the answer until the stream ends, with io.EOF or another error.
func Ask(ctx context.Context, connection grpc.ClientConnInterface) error {
	question := &lockstepv1.ChatMessage{Role: lockstepv1.Role_ROLE_USER, Content: "Why is the sky blue?"}
	chat := &lockstepv1.Chat{Messages: []*lockstepv1.ChatMessage{question}}
	request := &lockstepv1.GenerateRequest{
		Prompt:   &lockstepv1.GenerateRequest_Chat{Chat: chat},
		Sampling: &lockstepv1.SamplingParams{Temperature: proto.Float32(0), MaxTokens: proto.Uint32(100)},
	}
	stream, err := lockstepv1.NewTokenizerServiceClient(connection).Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		fmt.Print(response.GetText())
	}
}
