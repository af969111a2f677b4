import io.lockstep.v1.Chat;
import io.lockstep.v1.ChatMessage;
import io.lockstep.v1.FinishReason;
import io.lockstep.v1.GenerateRequest;
import io.lockstep.v1.GenerateResponse;
import io.lockstep.v1.Role;
import io.lockstep.v1.SamplingParams;
import java.io.IOException;

/** Makes a request and reads a response. It is compiled with what protoc generates, never run. */
public class Client {
  public static void main(String[] args) throws IOException {
    ChatMessage question =
        ChatMessage.newBuilder().setRole(Role.ROLE_USER).setContent("Why is the sky blue?").build();
    SamplingParams sampling = SamplingParams.newBuilder().setTemperature(0).setMaxTokens(100).build();
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setChat(Chat.newBuilder().addMessages(question))
            .setSampling(sampling)
            .build();
    request.writeTo(System.out);

    GenerateResponse response = GenerateResponse.parseFrom(System.in);
    System.out.print(response.getText());
    if (response.getFinish().getReason() == FinishReason.FINISH_REASON_MAX_TOKENS) {
      System.out.print("...");
    }
  }
}
