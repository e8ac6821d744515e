//! What to do with a model whose files are pickles, or whose tokenizer is in an older form.

/// Two lines of Python by which `transformers` writes the model `name`, a folder or a repository of the hub, as
/// safetensors with a `tokenizer.json`; as a hint.
pub fn how_to_convert(name: &str) -> String {
    format!(
        "these two lines of Python write it to the folder converted, which can be read:\n    \
         from transformers import AutoModelForCausalLM, AutoTokenizer\n    \
         for part in AutoModelForCausalLM, AutoTokenizer: part.from_pretrained({name:?}).save_pretrained(\"converted\")"
    )
}
