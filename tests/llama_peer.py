"""transformers' name for the shape of our network."""


def config_of(c):
    """The LlamaConfig of a network with our Config `c`."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=c.vocabulary_size,
        hidden_size=c.width,
        intermediate_size=c.hidden,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )
