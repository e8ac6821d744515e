//! Models in the Hugging Face layout whose next token is looked up in a table: after each token comes one other token.
use crate::tiny_run::TinyRun;
use burn::tensor::TensorData;
use serde_json::{Value, json};
use sieve_hf::{NamedTensor, write_tensor_file};
use std::fs;

/// Tokens of the models, then special ones.
const WORDS: [&str; 9] = ["<unk>", "▁The", "▁lazy", "▁dog", "▁jumps", "▁What?", "▁Paris", "▁Be", "▁short"];
const SPECIAL: [&str; 5] = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"];
/// Each token and its successor; after all others comes `<unk>`.
const SUCCESSORS: [(&str, &str); 10] = [
    ("▁lazy", "▁dog"),
    ("▁dog", "▁jumps"),
    ("▁jumps", "</s>"),
    ("▁What?", "</s>"),
    ("<|assistant|>", "▁Paris"),
    ("▁Paris", "</s>"),
    ("▁Be", "▁short"),
    ("▁short", "<|user|>"),
    ("<|user|>", "▁The"),
    ("▁The", "</s>"),
];
const TEMPLATE: &str = "{% for message in messages %}{{ '<|' + message.role + '|> ' + message.content }}{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";
/// Width of the model, and rows of its embedding.
const WIDTH: usize = 16;

/// Writes `metaspace` and `llama`, two folders of one model whose tokenizers have the decoders of published models;
/// both decoders drop the first space of a text. `metaspace` has a chat template.
pub(crate) fn write(tiny: &TinyRun) {
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let llama = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    for (name, decoder, template) in [("metaspace", &metaspace, Some(TEMPLATE)), ("llama", &llama, None)] {
        let folder = tiny.path(name);
        fs::create_dir(&folder).expect("it is new");
        let text = |name: &str, value: Value| fs::write(folder.join(name), value.to_string()).expect("writable");
        text("config.json", config());
        text("tokenizer.json", tokenizer(&metaspace, decoder));
        let names = json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template});
        text("tokenizer_config.json", names);
        write_tensor_file(&folder.join("model.safetensors"), &weights(), None).expect("writable");
    }
}

fn config() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "hidden_act": "silu",
        "vocab_size": WIDTH, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128,
        "tie_word_embeddings": false, "bos_token_id": id("<s>"), "eos_token_id": id("</s>"),
    })
}

fn id(token: &str) -> usize {
    let found = WORDS.iter().chain(&SPECIAL).position(|known| *known == token);
    found.expect("a token")
}

fn tokenizer(pre_tokenizer: &Value, decoder: &Value) -> Value {
    let vocab: serde_json::Map<_, _> =
        WORDS.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
    let added = SPECIAL.map(|token| {
        json!({"id": id(token), "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": pre_tokenizer,
        "post_processor": null, "decoder": decoder, "added_tokens": added,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    })
}

/// Blocks that add nothing, an embedding that is the identity, and an output that looks the successor up.
fn weights() -> Vec<NamedTensor> {
    let mut head = vec![0.0f32; WIDTH * WIDTH];
    SUCCESSORS.iter().for_each(|(token, next)| head[id(next) * WIDTH + id(token)] = 5.0);
    let identity = (0..WIDTH * WIDTH).map(|at| f32::from(u8::from(at % WIDTH == at / WIDTH))).collect();
    let of = |name: &str, values: Vec<f32>, shape: [usize; 2]| NamedTensor {
        name: name.to_owned(),
        data: TensorData::new(values, shape),
    };
    let ones = |name: &str| NamedTensor { name: name.to_owned(), data: TensorData::new(vec![1.0f32; WIDTH], [WIDTH]) };
    let layer = "model.layers.0.";
    let mut all = vec![
        of("lm_head.weight", head, [WIDTH, WIDTH]),
        of("model.embed_tokens.weight", identity, [WIDTH, WIDTH]),
        ones("model.norm.weight"),
        ones(&format!("{layer}input_layernorm.weight")),
        ones(&format!("{layer}post_attention_layernorm.weight")),
    ];
    for (name, shape) in [
        ("self_attn.q_proj", [WIDTH, WIDTH]),
        ("self_attn.k_proj", [WIDTH, WIDTH]),
        ("self_attn.v_proj", [WIDTH, WIDTH]),
        ("self_attn.o_proj", [WIDTH, WIDTH]),
        ("mlp.gate_proj", [8, WIDTH]),
        ("mlp.up_proj", [8, WIDTH]),
        ("mlp.down_proj", [WIDTH, 8]),
    ] {
        all.push(of(&format!("{layer}{name}.weight"), vec![0.0; shape[0] * shape[1]], shape));
    }
    all
}
