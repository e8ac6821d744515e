//! The model card of an export, `README.md`: what the model is, how it is loaded, and which programs cannot serve it.
use super::{Architecture, ExportOptions};
use crate::Checkpoint;
use serde_json::Value;
use sieve_core::kinds::StockClass;
use sieve_core::recipe::RANDOM_WEIGHTS;
use sieve_core::{ModelShape, Recipe, attention_words, thousands};
use std::path::Path;

/// Name of the card's file, which the Hugging Face hub shows as the page of a model.
pub(super) const CARD: &str = "README.md";

/// What a card is written from.
pub(super) struct Card<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// As its last stage has it.
    pub(super) recipe: &'a Recipe,
    /// The stages up to the checkpoint, each as a recipe of its own.
    pub(super) stages: Vec<Recipe>,
    pub(super) shape: &'a ModelShape,
    pub(super) architecture: Architecture,
    pub(super) options: &'a ExportOptions,
    /// Numbers in the exported tensors.
    pub(super) num_parameters: u64,
    /// Whether `AutoTokenizer` would replace the tokenizer.
    pub(super) replaces_tokenizer: bool,
}

impl Card<'_> {
    /// Text of the card. The same checkpoint in the same run folder always gives the same text.
    pub(super) fn text(&self) -> String {
        let Self { architecture, shape, .. } = *self;
        let rows: String = self.rows().into_iter().map(|(name, words)| format!("| {name} | {words} |\n")).collect();
        format!(
            "---\n{}---\n# {} with {} attention\n{}\n\n| | |\n|---|---|\n{rows}\n## Use\n{}\n\
             ## What cannot serve it\n{}\n## Limits\n{}",
            self.metadata(),
            architecture.class().name,
            shape.attention.kind().name(),
            "A language model trained or converted by Sieve, in the layout of Hugging Face transformers.",
            self.commands(),
            self.programs(),
            self.limits(),
        )
    }

    /// The YAML that the hub reads.
    fn metadata(&self) -> String {
        let kind = self.shape.attention.kind().name();
        let mut yaml = format!("library_name: transformers\npipeline_tag: text-generation\ntags:\n- sieve\n- {kind}\n");
        if self.architecture == Architecture::Sieve {
            yaml.push_str("- custom_code\n");
        }
        let named = self.paths().into_iter().filter_map(|path| path.strip_prefix("hf://datasets/"));
        let mut names: Vec<String> = named
            .map(|path| path.split('/').take(2).collect::<Vec<_>>().join("/"))
            .map(|name| name.split('@').next().unwrap_or_default().to_owned())
            .collect();
        names.dedup();
        if !names.is_empty() {
            yaml.push_str("datasets:\n");
            yaml.extend(names.iter().map(|name| format!("- {}\n", Value::from(name.as_str()))));
        }
        yaml
    }

    /// Names and values of the table.
    fn rows(&self) -> Vec<(&'static str, String)> {
        let Self { recipe, shape, options, .. } = self;
        let mut rows = vec![
            ("class", format!("`{}`", self.architecture.class().name)),
            ("parameters", format!("{} in {}", thousands(self.num_parameters), options.dtype.name())),
            ("layers", format!("{} of width {}", shape.num_layers, shape.d_model)),
            (
                "heads",
                format!("{} for queries, {} for keys, width {}", shape.num_heads, shape.num_kv_heads, shape.head_dim),
            ),
            ("attention", attention_words(recipe, shape)),
            ("vocabulary", format!("{} tokens", thousands(shape.vocab_size as u64))),
            ("positions", shape.max_seq_len.to_string()),
        ];
        let state = &self.checkpoint.state;
        if state.step == 0 {
            rows.push(("training", "none by Sieve: the weights are as they were imported or drawn".to_owned()));
            return rows;
        }
        rows.push(("data", self.data()));
        let (steps, tokens) = (thousands(state.step), thousands(state.tokens_seen));
        let steps = format!("{steps} steps, {tokens} tokens in rows of {}", self.row_lengths());
        let is_of_another = recipe.model.initial_weights.as_ref().is_some_and(|from| from != RANDOM_WEIGHTS);
        rows.push(("training", steps + if is_of_another { ", from the weights of another checkpoint" } else { "" }));
        rows.extend(self.loss().map(|loss| ("loss", loss)));
        rows
    }

    /// The lengths of training rows in the order of the stages.
    fn row_lengths(&self) -> String {
        let mut lengths: Vec<String> = self.stages.iter().map(|stage| stage.training.seq_len.to_string()).collect();
        lengths.dedup();
        lengths.join(", then ")
    }

    /// The texts of all stages up to the checkpoint, each once.
    fn paths(&self) -> Vec<&String> {
        let mut all: Vec<&String> = Vec::new();
        for path in self.stages.iter().flat_map(|stage| &stage.data.paths) {
            if !all.contains(&path) {
                all.push(path);
            }
        }
        all
    }

    /// The texts that were trained on. Of a local file the name alone: the folders are no business of a published page.
    fn data(&self) -> String {
        let name = |path: &String| {
            if path.starts_with("hf://") {
                format!("`{path}`")
            } else {
                format!("`{}`", path.rsplit('/').next().unwrap_or(path))
            }
        };
        let names: Vec<_> = self.paths().into_iter().map(name).collect();
        if names.is_empty() { "generated".to_owned() } else { names.join(", ").replace('|', "\\|") }
    }

    /// The validation loss that the run folder has for the checkpoint's step; else the mean loss of its latest steps;
    /// `None` without either.
    fn loss(&self) -> Option<String> {
        let state = &self.checkpoint.state;
        let run = self.checkpoint.path.parent().and_then(Path::parent);
        let metrics = run.and_then(|run| sieve_files::read_text(&run.join("metrics.jsonl")).ok()).unwrap_or_default();
        let lines = metrics.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut here = lines.filter(|line| line["kind"] == "validation" && line["step"] == state.step);
        let validation = here.find_map(|line| {
            let bits = line["bits_per_byte"].as_f64().map(|bits| format!(", {bits:.3} bits per byte"));
            let token = if self.recipe.data.has_answers() { "answer token" } else { "token" };
            Some(format!("{:.3} nats a held-out {token}{}", line["loss"].as_f64()?, bits.unwrap_or_default()))
        });
        let training = state.guard.as_ref().filter(|guard| guard.num_losses > 0.0);
        validation.or_else(|| training.map(|guard| format!("{:.3} nats a training token", guard.mean_loss)))
    }

    /// Commands that load the export.
    fn commands(&self) -> String {
        let trust = if self.architecture == Architecture::Sieve { ", trust_remote_code=True" } else { "" };
        let eager = if self.architecture == Architecture::Doge { ", attn_implementation=\"eager\"" } else { "" };
        // AutoTokenizer reads config.json, which names a class of the folder's own, and would ask on the terminal.
        let (tokenizer, its_trust) =
            if self.replaces_tokenizer { ("PreTrainedTokenizerFast", "") } else { ("AutoTokenizer", trust) };
        let (inputs, prompt) = if self.checkpoint.answers_chats(self.recipe) {
            (
                "chat = [{\"role\": \"user\", \"content\": \"Who are you?\"}]\n\
             inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, \
             return_tensors=\"pt\")",
                "--chat --prompt 'Who are you?'",
            )
        } else {
            ("inputs = tokenizer(\"Once\", return_tensors=\"pt\")", "--prompt Once")
        };
        let sieve = format!("```\nsieve generate --checkpoint . {prompt}\nsieve import --from . --out in\n```\n");
        if self.architecture == Architecture::M3Vllm {
            return format!("```\nvllm serve .\n```\n\n{sieve}");
        }
        format!(
            "```python\nfrom transformers import AutoModelForCausalLM, {tokenizer}\n\n\
             folder = \".\"  # this folder, or its name on the hub\n\
             tokenizer = {tokenizer}.from_pretrained(folder{its_trust})\n\
             model = AutoModelForCausalLM.from_pretrained(folder{trust}{eager})\n\
             {inputs}\n\
             print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))\n```\n\n{sieve}"
        )
    }

    /// Which programs give wrong text or refuse the model, by what was tried (docs/export.md).
    fn programs(&self) -> String {
        let is_windowed = matches!(
            self.shape.attention.as_kind().stock(self.shape).map(|stock| stock.class),
            Ok(StockClass::Grouped { windowed: true })
        );
        match self.architecture {
            Architecture::Sieve => {
                "- vLLM, SGLang and other engines that put in an attention function of their own: refused, because its \
                 cache and masks are not this model's.\n\
                 - Continuous batching of transformers (`generate_batch`), caches of fixed size, flex attention, flash \
                 attention and `output_attentions`: refused.\n\
                 - llama.cpp: its converter refuses the class.\n"
            }
            Architecture::Doge => {
                "- **vLLM and SGLang give wrong text without an error**: they run the class of transformers with an \
                 attention function that passes over its mask. An export with `--form sieve` is refused there.\n\
                 - transformers 5.10.4 with SDPA, its default, is wrong: pass `attn_implementation=\"eager\"`.\n\
                 - llama.cpp: its converter refuses the class.\n"
            }
            Architecture::M3 => {
                "- **Batches whose padding is on the left get wrong text without an error**: in transformers (5.23.0) \
                 blocks of keys begin at the padding. Give it one prompt at a time.\n\
                 - **Engines that put an attention function of their own into the class of transformers**, as vLLM's \
                 `--model-impl transformers` does, read all keys: other text than the model's.\n\
                 - Training in other programs, and float16: the up projections are stored times 2^32, because this \
                 class multiplies by `up + 1`, and the down projections divided by it. PyTorch refuses float16.\n\
                 - vLLM: its class of this model has other keys; `--form m3-vllm` writes them.\n"
            }
            Architecture::M3Vllm => {
                "- vLLM itself was not run: names, shapes and keys were compared with its 0.33.0.\n\
                 - transformers: its class of this model has other keys; `--form m3` writes them.\n"
            }
            Architecture::DeepseekV3 => {
                "- **Continuous batching of transformers (`generate_batch`) gives empty texts** and logs an error \
                 (5.24.0).\n"
            }
            _ if is_windowed => {
                "- **llama.cpp gives wrong text without an error**: its converter drops the window of this class, so \
                 prompts longer than the window get a different attention.\n"
            }
            _ => "- None of transformers, vLLM and llama.cpp is known to refuse it.\n",
        }
        .to_owned()
    }

    /// The card's section on the limits of the model, as a Markdown list.
    fn limits(&self) -> String {
        let ties = "- Of keys with equal scores the class keeps whichever `torch.topk` returns: logits differ from \
                    Sieve's by some tenths beyond `keep_window_size` tokens.\n";
        // What an imported model was trained on is not known here.
        let longest = self.stages.iter().map(|stage| stage.training.seq_len).max();
        let rows = longest
            .filter(|_| self.checkpoint.state.step > 0)
            .map(|longest| format!("- Sieve trained it on no text longer than {longest} tokens.\n"));
        format!(
            "- It continues texts like those it was trained on, and repeats what is wrong in them.\n{}{}\
             - No licence is named here, and none for its data: add both before it is published.\n",
            rows.unwrap_or_default(),
            if self.architecture == Architecture::Doge { ties } else { "" },
        )
    }
}
