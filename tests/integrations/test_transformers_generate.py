"""PagedCache under transformers' generate: the same tokens and the same bits of every logit as DynamicCache."""

import copy
import functools

import pytest
from needs import need_module

torch = need_module("torch", "transformers")
transformers = need_module("transformers", "transformers")

from pagedkv.integrations.transformers import PagedCache  # noqa: E402

pytestmark = pytest.mark.torch

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = torch.tensor([[1, 5, 9, 12, 7], [3, 3, 9, 1, 8]])
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 10},
    "beams": {"num_beams": 4},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "assisted": {"assisted": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On so little work threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def model(name, layers=2, attention="sdpa", dtype=torch.float32, **more):
    """A random model whose large weights make it say different tokens."""
    small = {**SMALL, "num_hidden_layers": layers, **more}
    config, network = {
        "Llama": (transformers.LlamaConfig(**small), transformers.LlamaForCausalLM),
        "Qwen2": (transformers.Qwen2Config(**small), transformers.Qwen2ForCausalLM),
        "Mistral": (transformers.MistralConfig(**small), transformers.MistralForCausalLM),
        "GPT2": (
            transformers.GPT2Config(
                vocab_size=97,
                n_embd=32,
                n_layer=layers,
                n_head=4,
                bos_token_id=1,
                eos_token_id=2,
                tie_word_embeddings=False,
            ),
            transformers.GPT2LMHeadModel,
        ),
    }[name]
    config._attn_implementation = attention
    torch.manual_seed(0)
    made = network(config).eval().to(dtype)
    for weights in made.parameters():
        if weights.ndim > 1:
            weights.data.mul_(12.0)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


@functools.cache
def assistant(network):
    """A draft model: the same one with a little noise, so that some of its tokens are accepted and some are not."""
    draft = copy.deepcopy(network)
    torch.manual_seed(2)
    for weights in draft.parameters():
        weights.data += 0.1 * weights.std() * torch.randn_like(weights) if weights.ndim > 1 else 0
    return draft


def generate(network, cache, prompts=PROMPTS, *, name="cache", assisted=False, **options):
    if assisted:
        options["assistant_model"] = assistant(network)
    torch.manual_seed(1)
    if assisted or "prompt_lookup_num_tokens" in options:
        prompts = prompts[:1]
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 14} | options
    return network.generate(
        prompts, output_logits=True, return_dict_in_generate=True, **{name: cache}, **options
    )


def assert_equal(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.logits) == len(theirs.logits)
    assert max((a - b).abs().max().item() for a, b in zip(ours.logits, theirs.logits, strict=True)) == 0.0


@functools.cache
def dynamic(name, mode):
    network = model(name)
    return generate(network, transformers.DynamicCache(config=network.config), **MODES[mode])


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2"])
def test_every_mode_gives_the_tokens_and_logits_of_dynamic_cache(name, mode, block_size):
    network, theirs = model(name), dynamic(name, mode)
    cache = PagedCache(network.config, 256, block_size, poison=True)
    ours = generate(network, cache, **MODES[mode])
    assert_equal(ours, theirs)
    for row in ours.sequences:
        assert row[5:].unique().numel() > 4  # a model that repeats itself would prove little
    cache.reset()
    assert cache.blocks_used == 0


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])},
        {"prefill_chunk_size": 2},
        {"attention": "eager"},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
    ],
    ids=["left padding", "chunked prefill", "eager", "bfloat16", "float16"],
)
def test_other_ways_to_run_a_model_change_nothing(options, num_beams):
    made = {key: options[key] for key in options if key in ("attention", "dtype")}
    network = model("Llama", **made)
    asked = {key: options[key] for key in options if key not in made} | {"num_beams": num_beams}
    theirs = generate(network, transformers.DynamicCache(config=network.config), **asked)
    cache = PagedCache(network.config, 256, 4, poison=True)
    assert_equal(generate(network, cache, **asked), theirs)
    assert cache.engine.storage.dtype == str(made.get("dtype", torch.float32)).removeprefix("torch.")


def test_a_continued_cache_goes_on_where_it_stopped():
    network, results = model("Llama"), []
    for cache in (PagedCache(network.config, 64, 4), transformers.DynamicCache(config=network.config)):
        first = generate(network, cache)
        longer = torch.cat([first.sequences, PROMPTS], dim=1)
        results.append(generate(network, cache, longer))
    assert_equal(*results)


def shared_prompt(network, cache, samples):
    """Two prompts computed once but for their last tokens, then repeated."""
    with torch.no_grad():
        network(PROMPTS[:, :-1], cache=cache)
    cache.batch_repeat_interleave(samples)
    return cache


@pytest.mark.parametrize("mode", ["return sequences", "beams"])
def test_a_prompt_computed_once_is_shared_by_its_samples_and_beams(mode):
    network, samples = model("Llama"), {"return sequences": 3, "beams": 4}[mode]
    cache = shared_prompt(network, PagedCache(network.config, 256, 1), samples)
    assert (cache.batch_size, cache.stats.used, cache.stats.unshared) == (2 * samples, 8, 8 * samples)
    theirs = shared_prompt(network, transformers.DynamicCache(config=network.config), samples)
    assert_equal(generate(network, cache, **MODES[mode]), generate(network, theirs, **MODES[mode]))
    if mode == "return sequences":
        assert cache.stats.used == 8 + 2 * samples * 14  # the prompts once; the last token is not computed


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_beams_reorder_the_cache_whichever_name_it_has(name):
    network = model("Qwen2")
    cache = PagedCache(network.config, 256, 4)
    assert_equal(generate(network, cache, name=name, num_beams=4), dynamic("Qwen2", "beams"))


def test_drafts_are_cut_off_by_none_and_by_some_and_their_blocks_freed():
    crops = []

    class Watched(PagedCache):
        def crop(self, tokens_to_remove):
            super().crop(tokens_to_remove)
            assert self.blocks_used == self.get_seq_length()
            crops.append(int(tokens_to_remove))

    network = model("Llama")
    assert_equal(
        generate(network, Watched(network.config, 64, 1), assisted=True), dynamic("Llama", "assisted")
    )
    assert max(crops) == 0 > min(crops)


def test_offloading_between_the_steps_of_a_beam_search_changes_nothing():
    class Offloaded(PagedCache):
        def reorder_cache(self, beam_idx):
            super().reorder_cache(beam_idx)
            for layer in self.layers:
                layer.offload()
                layer.prefetch()

    network = model("Llama")
    assert_equal(generate(network, Offloaded(network.config, 256, 4), num_beams=4), dynamic("Llama", "beams"))


def test_a_deep_copy_goes_on_alone():
    network = model("Llama")
    cache = PagedCache(network.config, 64, 4, poison=True)
    first = generate(network, cache, num_beams=2)
    longer = torch.cat([first.sequences, PROMPTS], dim=1)
    twin, stats = copy.deepcopy(cache), cache.stats
    assert (twin.stats, twin.seq_ids) == (stats, cache.seq_ids)
    ours = generate(network, twin, longer, num_beams=2)
    assert cache.stats == stats
    assert_equal(ours, generate(network, cache, longer, num_beams=2))


def test_beams_of_a_prompt_use_fewer_blocks_than_each_alone():
    network = model("Llama")
    for block_size in (1, 4, 16):
        cache = PagedCache(network.config, 256, block_size)
        generate(network, cache, num_beams=4)
        stats = cache.stats
        print(f"2 prompts × 4 beams, blocks of {block_size}: {stats}")
        held = {block for table in cache.manager.block_tables(cache.seq_ids).tolist() for block in table}
        assert stats.used == len(held) < stats.unshared == 8 * -(-18 // block_size)
        assert (stats.copied > 0) == (block_size > 1)  # a full block is never written into


def test_a_sliding_window_is_masked_and_its_blocks_are_kept():
    network = model("Mistral", sliding_window=8)
    theirs = generate(network, transformers.DynamicCache(config=network.config))
    cache = PagedCache(network.config, 64, 4)
    ours = generate(network, cache)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.allclose(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4)
    assert cache.get_seq_length() == 18


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_pool_that_runs_out_refuses_the_step_and_the_cache_can_go_on(num_beams):
    from pagedkv import PoolExhausted

    network, whole = model("Llama"), dynamic("Llama", "greedy" if num_beams == 1 else "beams")
    cache = PagedCache(network.config, 8, 4)
    with pytest.raises(PoolExhausted) as refusal:
        generate(network, cache, num_beams=num_beams)
    assert f"{2 * num_beams} rows" in refusal.value.__notes__[0]
    assert cache.blocks_used <= 8
    assert {layer.get_seq_length() for layer in cache.layers} == {cache.get_seq_length()}
    if num_beams == 1:  # what it holds is sound: another pool takes over
        held = cache.get_seq_length()
        bigger = PagedCache(network.config, 64, 4)
        bigger._rows.take(cache._rows)
        ours = generate(network, bigger, whole.sequences[:, : held + 1], max_new_tokens=18 - held)
        assert torch.equal(ours.sequences, whole.sequences)
    cache.reset()
    assert cache.blocks_used == 0
    generate(network, cache, max_new_tokens=4)
