"""The endpoint as its clients see it: a real server on a loopback port, driven by the `openai` client."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from torch import nn

import leantune
from leantune.generate.edits import EditSettings
from leantune.generate.sampling import Sampling
from leantune.serve.app import make_app
from leantune.serve.engine import Engine, Limits
from leantune.serve.models import Served, load_served, named_runs
from leantune.serve.server import listen, make_server
from tests.fixtures import tiny_model_folder
from tests.runs import tiny_run

PROMPT = "How many people are there?"
LENGTH = 12
REFT = {"name": "loreft", "rank": 4, "position": "f2+l2", "subspaces": {"formal": "0-1", "sql": "2-3"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    tiny_run(folder / "lora", model, data={"system": "Be brief."})
    tiny_run(folder / "reft", model, template="chat", method=REFT)
    return {"lora": str(folder / "lora"), "bot": str(folder / "reft")}


@pytest.fixture(scope="module")
def served(runs: dict[str, str]) -> Served:
    return load_served(named_runs([runs["lora"], f"bot={runs['bot']}"]), device="cpu")


@contextmanager
def serving(served: Served, **limits: Any) -> Iterator[str]:
    """The address of a server in a thread."""
    with listen("127.0.0.1", 0) as listener:
        server: uvicorn.Server = make_server(make_app(Engine(served, Limits(**limits))))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            wait_until(lambda: server.started)
            yield address
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def address(served: Served) -> Iterator[str]:
    with serving(served, max_wait_ms=400) as address:
        yield address


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address) as client:
        yield client


def chat(client: openai.OpenAI, model: str, prompt: str = PROMPT, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    options = {"max_tokens": LENGTH, **options}
    return client.chat.completions.create(model=model, messages=messages, **options)


def health(address: str) -> dict[str, Any]:
    return httpx.get(f"{address}/health").json()


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def expected(path: str, prompts: list[str], **options: Any) -> list[str]:
    return leantune.load(path, device="cpu").generate(prompts, Sampling(max_new_tokens=LENGTH), **options)


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [found.id for found in client.models.list()] == ["lora", "bot", "base"]


def test_one_batch_of_three_models_answers_as_each_run_alone(
    client: openai.OpenAI, address: str, runs: dict[str, str], model: Path
) -> None:
    """Adapters, templates and system messages are those of each request, whoever shares its batch."""
    before = health(address)["batches"]
    places = {**runs, "base": str(model)}
    prompts = [PROMPT, "the old man said to the woman"]
    asked = [(name, prompt) for name in places for prompt in prompts]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda pair: chat(client, *pair), asked))
    answers = [reply.choices[0].message.content for reply in replies]
    assert answers == [answer for path in places.values() for answer in expected(path, prompts)]
    assert len(set(answers)) == len(answers)
    assert health(address)["batches"] == before + 1


def test_tokens_are_counted(client: openai.OpenAI, served: Served) -> None:
    reply = chat(client, "bot")
    prompt = served.models["bot"].prompt([{"role": "user", "content": PROMPT}])
    count = len(served.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.prompt_tokens == count
    assert reply.usage.completion_tokens == LENGTH
    assert reply.usage.total_tokens == count + LENGTH


@pytest.mark.parametrize("name", ["lora", "bot", "base"])
def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI, name: str) -> None:
    whole = chat(client, name)
    chunks = list(chat(client, name, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = chat(client, "base").choices[0].message.content
    stop = whole[len(whole) // 2 :][:2]
    reply = chat(client, "base", stop=[stop, "never"])
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens < LENGTH


def test_a_seed_repeats_a_drawn_answer(client: openai.OpenAI) -> None:
    drawn = [
        chat(client, "base", temperature=1.3, top_p=0.9, seed=seed).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_prompt_is_continued_as_it_is(client: openai.OpenAI, runs: dict[str, str]) -> None:
    loaded = leantune.load(runs["lora"], device="cpu")
    (answer,) = loaded.complete([PROMPT], Sampling(max_new_tokens=LENGTH))
    reply = client.completions.create(model="lora", prompt=PROMPT, max_tokens=LENGTH)
    assert reply.choices[0].text == answer
    streamed = client.completions.create(model="lora", prompt=PROMPT, max_tokens=LENGTH, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"strength": 0.25}, EditSettings(strength=0.25)),
        ({"subspaces": ["sql"]}, EditSettings(subspaces=("sql",))),
        ({"generation": "all"}, EditSettings(generation="all")),
    ],
    ids=["strength", "subspaces", "generation"],
)
def test_interventions_obey_what_a_request_adds(
    client: openai.OpenAI, runs: dict[str, str], body: dict[str, Any], settings: EditSettings
) -> None:
    reply = chat(client, "bot", extra_body=body)
    (answer,) = expected(runs["bot"], [PROMPT], edits=settings)
    assert reply.choices[0].message.content == answer
    assert answer != expected(runs["bot"], [PROMPT])[0]


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are: lora, bot, base") as unknown:
        chat(client, "gpt")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="512 positions"):
        chat(client, "base", prompt="the old man " * 300)
    with pytest.raises(openai.BadRequestError, match="n: 2 is not supported here") as several:
        chat(client, "base", n=2)
    assert several.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="strength"):
        chat(client, "lora", extra_body={"strength": 2.0})
    with pytest.raises(openai.BadRequestError, match="temprature"):
        chat(client, "lora", extra_body={"temprature": 1.0})


def test_what_is_no_request_of_ours_has_an_error_object_too(address: str) -> None:
    reply = httpx.post(
        f"{address}/v1/chat/completions", content="{", headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    unknown = httpx.get(f"{address}/v1/embeddings")
    assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, "GET /v1/embeddings: Not Found")


@contextmanager
def slow(served: Served, seconds: float = 0.02) -> Iterator[None]:
    """Every forward pass takes a while, so that a test can act while an answer is under way."""

    def wait(_module: nn.Module, _args: Any) -> None:
        time.sleep(seconds)

    handle = served.model.register_forward_pre_hook(wait)
    try:
        yield
    finally:
        handle.remove()


def test_a_full_queue_is_refused_and_a_client_that_goes_frees_its_row(served: Served) -> None:
    """400 tokens would take 8 seconds, and nobody would listen."""
    with slow(served), serving(served, max_batch=1, max_queue=1) as address, client_of(address) as client:
        running = chat(client, "base", stream=True, max_tokens=400)
        next(iter(running))
        wait_until(lambda: health(address)["running"] == 1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(chat, client, "bot")
            wait_until(lambda: health(address)["waiting"] == 1)
            with pytest.raises(openai.RateLimitError, match="1 requests are waiting") as full:
                chat(client, "base")
            assert full.value.code == "queue_full"
            begin = time.monotonic()
            running.close()
            reply = waiting.result(20)
        assert reply.usage.completion_tokens == LENGTH
        assert time.monotonic() - begin < 4


def test_a_client_that_goes_while_it_waits_is_never_answered(served: Served) -> None:
    with slow(served), serving(served, max_batch=1) as address, client_of(address) as client:
        with closing(chat(client, "base", stream=True, max_tokens=100)) as running:
            next(iter(running))
            with pytest.raises(openai.APITimeoutError):
                chat(client.with_options(timeout=0.3), "bot")
            wait_until(lambda: health(address)["waiting"] == 0)
            assert health(address)["running"] == 1
        wait_until(lambda: health(address)["running"] == 0)
        assert health(address)["batches"] == 1


def test_a_failure_of_the_model_is_told_and_the_next_request_answered(served: Served) -> None:
    def fail(_module: nn.Module, _args: Any) -> None:
        raise RuntimeError("out of memory")

    with serving(served) as address, client_of(address) as client:
        handle = served.model.register_forward_pre_hook(fail)
        try:
            with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
                chat(client, "base")
            with pytest.raises(openai.APIError, match="RuntimeError: out of memory"):
                list(chat(client, "base", stream=True))
        finally:
            handle.remove()
        assert chat(client, "base").choices[0].message.content


def test_the_command_serves_until_ctrl_c(runs: dict[str, str]) -> None:
    """The verb, the address that it prints, and an end without a traceback."""
    command = [sys.executable, "-m", "leantune", "serve", runs["lora"], "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "models: lora, base\n"
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found
        body = {"model": "lora", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": LENGTH}
        reply = httpx.post(f"{found[0]}/v1/chat/completions", json=body, timeout=60)
        assert (
            json.loads(reply.text)["choices"][0]["message"]["content"] == expected(runs["lora"], [PROMPT])[0]
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_a_body_that_is_too_long_is_refused_before_it_is_read_whole(served: Served) -> None:
    with serving(served) as address, closing(httpx.Client()) as client:
        body = {"model": "base", "messages": [{"role": "user", "content": "a" * (9 * 2**20)}]}
        reply = client.post(f"{address}/v1/chat/completions", json=body)
        assert reply.status_code == 413
        assert "longer than" in reply.json()["error"]["message"]
        assert client.get(f"{address}/health").status_code == 200
