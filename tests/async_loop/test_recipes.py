"""Deployment shapes as values: what they print, how they merge, and what they refuse."""

import shlex
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.async_loop.recipes import (
    FEATURES,
    MODELS,
    Deployment,
    Model,
    Process,
    colocated,
    prefill_decode,
    replicas,
    wide_ep,
    with_router,
)
from primeblocks.async_loop.recipes.arguments import arguments_of, merge, words_of
from primeblocks.errors import PlanError, UnsupportedError, UsageError
from tests.async_loop.serving_models import CONFIGS

QWEN, GLM, DEEPSEEK = MODELS["Qwen3-30B-A3B"], MODELS["GLM-4.5"], MODELS["DeepSeek-V3"]
CAPTURE = ["--enable-return-routed-experts", "--aux-output-config", '{"max_bytes": 4096}']
HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]


def split(tensor: int = 1) -> Deployment:
    prefill = replicas(GLM, 1, tensor=tensor, gpus=range(4))
    return prefill_decode(prefill, replicas(GLM, 1, tensor=4, gpus=range(4, 8), port=8100))


def flag(process: Process, name: str) -> list[str]:
    return [word for use in process.arguments[name] for word in use]


class TestArguments:
    @given(
        st.dictionaries(
            st.from_regex("[a-z]{1,8}(_[a-z]{1,8})?", fullmatch=True).filter(
                lambda name: not name.startswith("no")
            ),
            st.one_of(
                st.booleans(),
                st.integers(0, 99),
                st.from_regex("[a-z0-9][a-z0-9./ -]*", fullmatch=True),
                st.lists(st.from_regex("[a-z]+", fullmatch=True), min_size=1),
                st.dictionaries(st.text(max_size=3), st.integers(), min_size=1),
            ),
        )
    )
    def test_words_are_read_back(self, settings):
        arguments = arguments_of(settings)
        assert arguments_of(shlex.split(shlex.join(words_of(arguments)))) == arguments
        assert merge(arguments, arguments) == arguments

    def test_objects_merge_by_key_and_middleware_adds_up(self):
        one = arguments_of({"aux_output_config": {"a": 1, "c": {"x": 1}}, "middleware": "m.One"})
        other = arguments_of({"aux_output_config": {"b": 2, "c": {"y": 2}}, "middleware": "m.Two"})
        assert words_of(merge(one, other)) == [
            "--aux-output-config",
            '{"a": 1, "c": {"x": 1, "y": 2}, "b": 2}',
            "--middleware",
            "m.One",
            "--middleware",
            "m.Two",
        ]

    def test_middleware_is_a_flag_for_each(self):
        both = arguments_of({"middleware": ["m.One", "m.Two"]})
        assert words_of(both) == ["--middleware", "m.One", "--middleware", "m.Two"]

    def test_what_is_no_json_cannot_be_merged(self):
        with pytest.raises(PlanError, match="--hf-overrides is given '{bad', which is no JSON"):
            merge(
                arguments_of(["--hf-overrides", "{bad"]), arguments_of({"hf_overrides": {"a": 1}})
            )

    def test_middleware_that_both_have_is_named_once(self):
        one = arguments_of({"middleware": "m.One"})
        both = merge(one, arguments_of({"middleware": "m.Two"}))
        assert merge(one, both) == merge(both, one) == both

    @pytest.mark.parametrize(
        ("one", "other", "named"),
        [
            ({"seed": 1}, ["--seed", "2"], "'1' and '2'"),
            (
                {"enable_lora": True},
                ["--no-enable-lora"],
                "--enable-lora, another --no-enable-lora",
            ),
            (["--no-x"], {"x": 3}, "--no-x, another --x"),
            (
                {"config": {"a": {"b": 1}}},
                {"config": {"a": {"b": 2}}},
                "--config a b to be 1 and 2",
            ),
            (
                {"kv_transfer_config": {"kv_connector": "A"}},
                {"kv_transfer_config": {"kv_connector": "B"}},
                "Join connectors where they are made",
            ),
        ],
    )
    def test_two_values_of_a_flag_are_refused(self, one, other, named):
        with pytest.raises(PlanError, match=named):
            merge(arguments_of(one), arguments_of(other))

    @pytest.mark.parametrize(
        "settings",
        ["--seed 1", ["1"], ["-tp", "2"], ["--a.b", "1"], {"a": None}, {"a": []}, {"a": [1]}],
    )
    def test_what_is_no_word_is_refused(self, settings):
        with pytest.raises(PlanError):
            arguments_of(settings)


class TestModels:
    @pytest.mark.parametrize("name", MODELS)
    def test_sizes_are_those_that_transformers_counts(self, name):
        from transformers import AutoModelForCausalLM

        config = CONFIGS[name]()
        with torch.device("meta"):
            counted = AutoModelForCausalLM.from_config(config)
        sizes = {key: parameter.numel() for key, parameter in counted.named_parameters()}
        routed = sum(size for key, size in sizes.items() if ".experts." in key)
        experts = config.num_experts if "Qwen" in name else config.n_routed_experts
        expected = (experts, config.num_attention_heads, sum(sizes.values()), routed)
        facts = MODELS[name]
        found = (facts.experts, facts.heads, facts.parameters, facts.expert_parameters)
        assert found == expected

    @pytest.mark.parametrize("wrong", [(0, 1, 9, 3), (8, 0, 9, 3), (8, 1, 9, 9), (8, 1, 9, 0)])
    def test_impossible_sizes_are_refused(self, wrong):
        with pytest.raises(UsageError, match="parameters must be|heads must be|experts must be"):
            Model("path", *wrong)

    @pytest.mark.parametrize("path", ["", "--help", "-h"])
    def test_a_path_that_vllm_would_read_as_a_flag_is_refused(self, path):
        with pytest.raises(UsageError, match="path must be a name or a folder"):
            replace(QWEN, path=path)


class TestShapes:
    def test_a_single_node_is_one_replica(self):
        (line,) = replicas(QWEN, tensor=2).commands()
        assert line == (
            "CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen3-30B-A3B --host 127.0.0.1 --port 8000 "
            "--tensor-parallel-size 2"
        )

    @given(
        count=st.integers(1, 12),
        tensor=st.sampled_from([1, 2, 4, 8]),
        hosts=st.integers(1, 4),
        gpus=st.lists(st.integers(0, 15), unique=True, max_size=8),
    )
    def test_replicas_never_share_a_gpu_or_a_port(self, count, tensor, hosts, gpus):
        room = len(gpus) // tensor * hosts
        if count > room:
            with pytest.raises(PlanError, match=f"{count} engines of {tensor} GPUs"):
                replicas(QWEN, count, tensor=tensor, hosts=HOSTS[:hosts], gpus=gpus)
            return
        found = replicas(QWEN, count, tensor=tensor, hosts=HOSTS[:hosts], gpus=gpus).processes
        assert [len(process.gpus) for process in found] == [tensor] * count
        assert len({(p.host, gpu) for p in found for gpu in p.gpus}) == count * tensor
        for host in {process.host for process in found}:
            urls = [process.url for process in found if process.host == host]
            assert urls == [f"http://{host}:{8000 + index}" for index in range(len(urls))]
        assert {gpu for process in found for gpu in process.gpus} <= set(gpus)

    @given(
        hosts=st.sampled_from([1, 2, 4]), tensor=st.sampled_from([1, 2, 4, 8]), each=st.booleans()
    )
    def test_ranks_of_wide_ep_start_where_the_host_before_ended(self, hosts, tensor, each):
        servers = "each" if each else "first"
        local = 8 // tensor
        data = hosts * local
        recipe = wide_ep(DEEPSEEK, data, tensor=tensor, hosts=HOSTS[:hosts], servers=servers)
        served = [process.url is not None for process in recipe.processes]
        assert served == [index == 0 or each for index in range(hosts)]
        assert all(process.experts == data * tensor for process in recipe.processes)
        if hosts == 1:
            return
        starts = {
            index: int(*flag(process, "--data-parallel-start-rank"))
            for index, process in enumerate(recipe.processes)
            if "--data-parallel-start-rank" in process.arguments
        }
        assert starts == {i: i * local for i in range(0 if each else 1, hosts)}
        assert ["--headless" in p.arguments for p in recipe.processes] == [not s for s in served]

    def test_prefill_and_decode_compose_with_any_shape(self):
        prefill = wide_ep(DEEPSEEK, 8, hosts=HOSTS[:1])
        decode = wide_ep(DEEPSEEK, 16, hosts=HOSTS[1:3])
        found = with_router(prefill_decode(prefill, decode), host=HOSTS[0])
        assert [p.role for p in found.processes] == ["prefill", "decode", "decode", "router"]
        assert [p.ports.get("nixl") for p in found.processes[:3]] == [
            range(5600, 5608),
            range(5600, 5608),
            range(5608, 5616),  # vLLM adds the rank's number to the port that it is given
        ]
        assert [p.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for p in found.processes[:3]] == [
            "5600"
        ] * 3
        router = found.processes[-1]
        assert flag(router, "--prefill") == ["http://10.0.0.1:8000"]
        assert flag(router, "--decode") == ["http://10.0.0.2:8000"]
        assert "--worker-urls" not in router.arguments

    def test_engines_on_one_host_get_side_channels_of_their_own(self):
        ports = [process.ports["nixl"] for process in split().processes]
        assert ports == [range(5600, 5601), range(5601, 5602)]

    def test_addresses_of_ipv6_are_in_brackets(self):
        recipe = with_router(replicas(QWEN, 2, hosts=["fd00::1", "fd00::2"], gpus=[0]))
        urls = ["http://[fd00::1]:8000", "http://[fd00::2]:8000"]
        assert flag(recipe.processes[-1], "--worker-urls") == urls
        assert flag(recipe.processes[0], "--host") == ["fd00::1"]

    def test_ranks_that_are_placed_elsewhere_are_not_counted(self):
        spread = {"pipeline_parallel_size": 2, "nnodes": 2}
        (process,) = replicas(QWEN, tensor=8).merge(spread).processes
        assert flag(process, "--nnodes") == ["2"]
        one = {"data_parallel_size": 8, "data_parallel_rank": 3}
        assert replicas(QWEN).merge(one).processes[0].gpus == (0,)

    def test_transfers_are_passed_in(self):
        joined = {"kv_transfer_config": {"kv_connector": "MultiConnector", "kv_role": "kv_both"}}
        prefill = replicas(GLM, 1, tensor=4, gpus=range(4))
        decode = replicas(GLM, 1, tensor=4, gpus=range(4, 8), port=8100)
        found = prefill_decode(prefill, decode, transfer={"prefill": joined, "decode": joined})
        assert all("MultiConnector" in flag(p, "--kv-transfer-config")[0] for p in found.processes)

    def test_colocated_is_what_remains_without_transfers(self):
        prefill = replicas(GLM, 1, tensor=4, gpus=range(4))
        decode = replicas(GLM, 1, tensor=4, gpus=range(4, 8), port=8100)
        assert colocated(prefill_decode(prefill, decode)) == prefill + decode
        both = with_router(colocated(split()).merge(CAPTURE))
        assert flag(both.processes[-1], "--worker-urls") == [
            "http://127.0.0.1:8000",
            "http://127.0.0.1:8100",
        ]

    def test_features_merge_into_engines_and_not_into_the_router(self):
        plain = with_router(replicas(QWEN, 2, tensor=2))
        recipe = plain.merge(
            FEATURES["mtp"],
            FEATURES["chunked prefill"],
            CAPTURE,
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        *engines, router = recipe.processes
        assert router == plain.processes[-1]
        assert all(flag(p, "--max-num-batched-tokens") == ["8192"] for p in engines)
        assert all(p.environment["VLLM_SERVER_DEV_MODE"] == "1" for p in engines)
        assert recipe.merge(CAPTURE) == recipe
        only = recipe.merge({"queue_size": 7}, roles=["router"])
        assert only.processes[:2] == recipe.processes[:2]
        assert flag(only.processes[-1], "--queue-size") == ["7"]

    def test_the_order_of_merging_does_not_matter_to_what_is_asked_for(self):
        one = replicas(QWEN).merge(FEATURES["lora"]).merge(CAPTURE)
        other = replicas(QWEN).merge(CAPTURE, FEATURES["lora"])
        assert one == other

    def test_the_table_tells_weights_and_features(self):
        fp8 = wide_ep(DEEPSEEK, 16, hosts=HOSTS[:2]).merge(FEATURES["fp8"])
        head, first, second = fp8.table().splitlines()
        assert head.split() == ["role", "host", "GPUs", "ports", "GiB", "a", "GPU", "features"]
        assert "http 8000 rpc 13345" in first
        assert "wide ep, fp8" in second
        # Attention and shared experts whole, a sixteenth of the routed ones, a byte each.
        expected = (671_026_404_352 - 653_908_770_816 + 653_908_770_816 // 16) / 2**30
        assert f" {expected:.0f} " in first


class TestRefusals:
    @pytest.mark.parametrize(
        ("build", "named"),
        [
            (lambda: replicas(QWEN, 0), "count must be at least 1; got 0"),
            (lambda: replicas(QWEN, tensor=0), "tensor must be at least 1"),
            (lambda: replicas(QWEN, hosts=[]), "hosts must be at least 1"),
            (lambda: replicas(QWEN, hosts="10.0.0.1"), r"Pass \['10.0.0.1'\]"),
            (lambda: replicas(QWEN, tensor=2, gpus=[3, 3]), r"GPU twice: gpus=\[3, 3\]"),
            (lambda: replicas(QWEN, 2, port=65535), "ports are 1 to 65535"),
            (lambda: replicas(QWEN).merge(environment={"A B": "1"}), "and its text: 'A B'"),
            (lambda: replicas(QWEN).merge(environment={"\u00e9": "1"}), "no variable and its text"),
            (lambda: replicas(QWEN).merge(environment={"A": "\0"}), "no variable and its text"),
            (lambda: replicas(QWEN).merge({"seed": 1}, roles="engines"), "no process is engines"),
            (lambda: replicas(QWEN, hosts=["a b"]), "a name or an address; got 'a b'"),
            (lambda: replicas(QWEN, hosts=[""]), "a name or an address; got ''"),
            (lambda: replicas(QWEN, gpus=[-1]), "gpu must be at least 0; got -1"),
            (lambda: replicas(QWEN, 10**5000), "count must be a whole number below"),
            (lambda: replicas(QWEN).merge({"data_parallel_size": "9" * 5000}), "a whole number"),
            (
                lambda: replicas(QWEN, 4, tensor=2).merge({"data_parallel_size": 4}),
                "has 8 ranks .* 2 GPUs",
            ),
            (
                lambda: replicas(QWEN, tensor=2).merge({"pipeline_parallel_size": 4}),
                "has 8 ranks .* 2 GPUs",
            ),
            (
                lambda: wide_ep(QWEN, 16, hosts=HOSTS[:2]).merge({"pipeline_parallel_size": 2}),
                "has 16 ranks .* 8 GPUs",
            ),
            (
                lambda: replicas(QWEN).merge({"pipeline_parallel_size": "two"}),
                "--pipeline-parallel-size is a whole number from 1; got 'two'",
            ),
            (
                lambda: prefill_decode(with_router(replicas(GLM, hosts=["a"]), host="a"), split()),
                "got .'decode', 'prefill', 'router'",
            ),
            (
                lambda: prefill_decode(
                    replicas(GLM, hosts=["a"]), replicas(GLM, hosts=["b"]), transfer={"both": []}
                ),
                'transfer has "prefill" and "decode"',
            ),
            (lambda: replicas(QWEN, 9), "need 2 hosts of 8 GPUs; got 1"),
            (lambda: replicas(QWEN, tensor=16), "larger hosts"),
            (lambda: replicas(QWEN, tensor=3), "32 attention heads"),
            (lambda: wide_ep(QWEN, 0), "data must be at least 1"),
            (lambda: wide_ep(QWEN, 12, hosts=HOSTS[:2]), "got data=12. Give 2 hosts"),
            (lambda: wide_ep(QWEN, 16), "Give 2 hosts"),
            (lambda: wide_ep(GLM, 24, hosts=HOSTS[:3]), "160 experts, which 24 ranks"),
            (lambda: replicas(GLM, 8) + replicas(GLM, 1, port=9000), r"want GPUs \[0\]"),
            (
                lambda: replicas(GLM, 4, gpus=range(4)) + replicas(GLM, 1, gpus=[7]),
                "both want port 8000 of 127.0.0.1",
            ),
            (lambda: with_router(replicas(QWEN), port=8000), "want port 8000"),
            (lambda: with_router(replicas(QWEN), metrics_port=8000), "want port 8000"),
            (lambda: with_router(with_router(replicas(QWEN))), "got .'engine', 'router'"),
            (lambda: with_router(replicas(QWEN), policy="best"), "policy is one of cache_aware"),
            (lambda: colocated(replicas(QWEN)), "got role engine"),
            (lambda: Deployment(()), "at least one process"),
            (lambda: replicas(QWEN).merge(CAPTURE, roles=["router"]), "no process is router"),
            (
                lambda: replicas(QWEN).merge(environment={"CUDA_VISIBLE_DEVICES": "7"}),
                "CUDA_VISIBLE_DEVICES is '0'",
            ),
            (lambda: replicas(QWEN).merge({"tensor_parallel_size": 2}), "drop one"),
            (
                lambda: prefill_decode(
                    replicas(GLM, tensor=8, hosts=["a"]), replicas(GLM, tensor=4, hosts=["b"])
                ),
                "prefill has tensor=8, decode 4",
            ),
            (
                lambda: prefill_decode(
                    replicas(GLM, tensor=2, hosts=["a"]), replicas(GLM, tensor=3, hosts=["b"])
                ),
                "no multiple",
            ),
            (
                lambda: prefill_decode(
                    replicas(GLM, hosts=["a"]), replicas(QWEN, hosts=["b"])
                ),
                "different models",
            ),
            (
                lambda: prefill_decode(replicas(GLM), replicas(GLM, gpus=[1], port=5600)),
                "want port 5600",
            ),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_together_is_refused_with_a_way_out(self, build, named):
        with pytest.raises(PlanError, match=named):
            build()

    def test_what_vllm_refuses_together_is_refused_with_its_reason(self):
        with pytest.raises(UnsupportedError, match="pipeline"):
            replicas(QWEN).merge(CAPTURE, {"pipeline_parallel_size": 2})
        transfer = {"kv_connector": "MoRIIOConnector", "kv_role": "kv_both"}
        with pytest.raises(UnsupportedError, match=r"transfer without routes: .* colocated\(\)"):
            replicas(QWEN).merge(CAPTURE, {"kv_transfer_config": transfer})
        assert split().merge(CAPTURE)  # NIXL alone: our plug-in lifts it.
        with pytest.raises(UnsupportedError, match="prefix cache"):
            replicas(QWEN).merge(CAPTURE, ["--no-enable-prefix-caching"])
