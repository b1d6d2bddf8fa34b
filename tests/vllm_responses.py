"""Answers lines of chats and of `/v1/responses` by vLLM's server, without a port: `vllm run-batch` has no responses."""

import asyncio
import json
import pathlib
import sys

from starlette.datastructures import State
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client, init_app_state
from vllm.entrypoints.launchers.run_batch import parse_args
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.usage.usage_lib import UsageContext


async def main() -> None:
    """Flags are those of `vllm run-batch`."""
    args = parse_args()
    answers = []
    async with build_async_engine_client(args, usage_context=UsageContext.OPENAI_BATCH_RUNNER) as client:
        state = State()
        await init_app_state(client, state, args, await client.get_supported_tasks())
        for line in pathlib.Path(args.input_file).read_text(encoding="utf-8").splitlines():
            asked = json.loads(line)
            if asked["url"] == "/v1/responses":
                request = ResponsesRequest.model_validate(asked["body"])
                answer = await state.openai_serving_responses.create_responses(request)
            else:
                chat = ChatCompletionRequest.model_validate(asked["body"])
                answer = await state.openai_serving_chat.create_chat_completion(chat)
            answers.append(answer.model_dump_json(by_alias=True))
    pathlib.Path(args.output_file).write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
