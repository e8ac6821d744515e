//! `--selector`: a sparse method in place of a dense model's attention.
use crate::exit::Exit;
use crate::terminal;
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};
use sieve_core::{ModelShape, attention_label};
use sieve_infer::{LayerPath, Selection, SelectionTotals};
use sieve_select::{LayerSelectors, Selector};

/// Help text of `--selector`.
const ABOUT: &str = "A sparse method in place of dense attention, NAME:key=value,…, or one for each layer, \
    0-3=dense/4-=NAME:…; `help` lists all";

/// Help text of `--chunk`.
pub const ABOUT_CHUNK: &str = "Process prompts in chunks of N tokens, each in its own call with all keys before it; \
    for prefill methods";

/// Help text of `--stream`.
const ABOUT_STREAM: &str = "Decode methods also process the prompt, token by token (on a GPU under quest and \
    exact_top, else on the CPU); without this flag the prompt is dense. `eval ppl` always works this way";

/// `--selector` with its options, for commands that take one selector.
#[derive(Args, Debug)]
pub struct SelectorArgs {
    /// The selectors of the layers; dense attention when absent.
    #[arg(long, value_name = "NAME:…", value_parser = parse, help = ABOUT)]
    pub selector: Option<LayerSelectors>,
    #[arg(long, value_name = "N", requires = "selector", help = ABOUT_CHUNK)]
    chunk: Option<usize>,
    /// Whether decode methods read the prompt too.
    #[arg(long, requires = "selector", help = ABOUT_STREAM)]
    pub stream: bool,
}

impl SelectorArgs {
    /// The selectors of the flags, checked for a model.
    pub fn selection(&self, shape: &ModelShape) -> Result<Option<Selection>> {
        let selector = self.selector.as_ref();
        let of = |one| reading(one, self.chunk, self.stream, shape);
        selector.map(of).transpose()
    }
}

/// `--selector` with its options, for commands that measure several beside the model's own attention.
#[derive(Args, Debug)]
pub struct SelectorsArgs {
    /// Also measure a sparse method in place of dense attention, once for each; `help` lists all
    #[arg(long, value_name = "NAME:…", value_parser = parse)]
    selector: Vec<LayerSelectors>,
    /// Tokens of a chunk in which a prompt is read; the whole prompt when absent.
    #[arg(long, value_name = "N", requires = "selector", help = ABOUT_CHUNK)]
    pub chunk: Option<usize>,
    /// Whether decode methods read the prompt too.
    #[arg(long, requires = "selector", help = ABOUT_STREAM)]
    pub stream: bool,
}

impl SelectorsArgs {
    /// `None` for the model's own attention, then the selectors one by one.
    pub fn own_and_each(&self, shape: &ModelShape) -> Result<Vec<Option<Selection>>> {
        let each = self.selector.iter();
        let each = each.map(|one| reading(one, self.chunk, self.stream, shape).map(Some));
        std::iter::once(Ok(None)).chain(each).collect()
    }
}

/// Prepares a selector for a model. With `chunk`, prompts are read in chunks of that many tokens.
pub fn selection(selectors: &LayerSelectors, chunk: Option<usize>, shape: &ModelShape) -> Result<Selection> {
    let selection = Selection::new(selectors.clone(), shape)?;
    Ok(match chunk {
        Some(chunk) => selection.in_chunks(chunk)?,
        None => selection,
    })
}

/// Prepares a selector for a model, with prompts in chunks; with `stream`, a decode method reads the prompt too, token
/// by token.
fn reading(one: &LayerSelectors, chunk: Option<usize>, stream: bool, shape: &ModelShape) -> Result<Selection> {
    let selection = selection(one, chunk, shape)?;
    Ok(if stream { selection.as_stream()? } else { selection })
}

/// Name of a selector, or of the model's own attention, in a report.
pub fn method(selector: Option<&str>, shape: &ModelShape) -> String {
    match selector {
        Some(selector) => short(selector),
        None => format!("{}, its own", attention_label(shape)),
    }
}

/// Parses `--selector`. The word `help` prints the list of methods and ends the program.
pub fn parse(text: &str) -> std::result::Result<LayerSelectors, String> {
    help(text);
    LayerSelectors::parse(text).map_err(|error| error.to_string())
}

/// Parses `--selector` where it must be a single selector for all layers; `help` prints the list and ends the program.
pub fn parse_one(text: &str) -> std::result::Result<Selector, String> {
    help(text);
    Selector::parse(text).map_err(|error| error.to_string())
}

fn help(text: &str) {
    if text == "help" {
        terminal::text(&Selector::help());
        Exit::Done.now();
    }
}

/// Shortens selectors from their full form, which names every parameter, to their label.
pub fn short(text: &str) -> String {
    LayerSelectors::parse(text).map_or_else(|_| text.to_owned(), |selectors| selectors.label())
}

/// Adds to a JSON object what a selector computed.
pub fn report(selection: &Selection, object: &mut Value) {
    object["selector"] = selection.selectors().to_string().into();
    object["chunk"] = selection.chunk().into();
    object["selection"] = json!(selection.totals());
    object["paths"] = json!(selection.paths());
}

/// How many calls of attention a selector left dense, and why; `None` if none.
pub fn dense_calls(totals: &SelectionTotals) -> Option<String> {
    let SelectionTotals { dense_calls, calls, .. } = totals;
    (*dense_calls > 0).then(|| {
        format!(
            "{dense_calls} of {calls} calls ran dense (shorter than min_prefill_tokens, in a dense layer, or the \
             method keeps everything)"
        )
    })
}

/// Lines about what a selector computed and on which device.
pub fn summary(selection: &Selection) -> String {
    let totals = selection.totals();
    if totals.calls == 0 {
        return format!(
            "selector          {:>14}  was never used: every token was part of a dense prompt, so these are the dense \
             model's results\n  hint: --stream lets it process prompts too",
            selection.selectors().name()
        );
    }
    let mut text = format!(
        "selector          {:>14}  {:.2} % of the pairs",
        selection.selectors().name(),
        100.0 * totals.density(),
    );
    if totals.seconds > 0.0 {
        text += &format!(
            ", {:.3} s of the CPU in attention, {:.3} s of them selecting",
            totals.seconds, totals.select_seconds
        );
    }
    text.extend(dense_calls(&totals).map(|words| format!("; {words}")));
    if totals.nan_lists > 0 {
        text += &format!("; {} heads ran dense because a score was NaN", totals.nan_lists);
    }
    if totals.kernel_calls > 0 || totals.host_bytes > 0 {
        text += &format!(
            "\nattention         {:>14}  of {} calls by the GPU's kernel, the others by the CPU; masks of {} chosen \
             on the GPU; {:.1} MB of q, k and v copied to the CPU",
            totals.kernel_calls,
            totals.calls,
            totals.device_selections,
            totals.host_bytes as f64 / 1e6
        );
    }
    text + "\npaths             " + &paths(&selection.paths())
}

/// A line about the path that each layer took. Layers with the same path are listed together.
pub fn paths(paths: &[LayerPath]) -> String {
    let mut all = Vec::new();
    for LayerPath { path, .. } in paths {
        let part = format!("{} {path}", layers(paths.iter().filter(|of| of.path == *path)));
        if !all.contains(&part) {
            all.push(part);
        }
    }
    all.join("; ")
}

/// `layer 2`, `layers 0-3` or `layers 2, 5`.
pub fn layers<'a>(ranges: impl Iterator<Item = &'a LayerPath>) -> String {
    let ranges =
        ranges.map(|of| if of.first == of.last { of.first.to_string() } else { format!("{}-{}", of.first, of.last) });
    let ranges = ranges.collect::<Vec<_>>().join(", ");
    let is_one = ranges.parse::<usize>().is_ok();
    format!("{} {ranges}", if is_one { "layer" } else { "layers" })
}

#[cfg(test)]
mod tests {
    use super::short;
    use sieve_select::LayerSelectors;

    #[test]
    fn a_short_form_parses_to_the_same_selector() {
        for asked in ["meanpool", "quest:budget=64", "xattention:stride=16,tau=0.5", "0-1=dense/2-=meanpool:tau=0.5"] {
            let selector = LayerSelectors::parse(asked).expect("valid");
            let short = short(&selector.to_string());
            let again = LayerSelectors::parse(&short).expect("as valid");
            assert_eq!(again, selector, "{short}");
            assert!(short.len() <= asked.len() + 2, "{short}");
        }
        assert_eq!(short("no such method:x=1"), "no such method:x=1");
    }
}
