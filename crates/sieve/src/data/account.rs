//! Makes the printed lines about a corpus: which documents were held out, and how many were left out.
use sieve_core::ShownPath;
use sieve_data::{CorpusReport, Prepared, PreparedMeta};
use sieve_host::terminal::{counted, thousands};
use sieve_train::TrainingData;

/// With fewer held-out tokens than this a warning is printed: losses of single tokens spread by about three nats, so
/// that the mean of a thousand is uncertain by a tenth of a nat.
const FEW_TOKENS: u64 = 1000;

/// Lines about a run's text and the texts of its stages: the held-out part where it is the end of the text instead of
/// whole documents, and how many documents were left out. Each line begins with `start`. `has_changed` means that a
/// resumed run's text files are no longer those its shards were made from.
pub(crate) fn lines(start: &str, data: &TrainingData, has_changed: bool) -> Vec<String> {
    let words = "the text files have changed or are gone; the run continues with the shards made before";
    let mut lines = Vec::from_iter(has_changed.then(|| format!("{start}{words}")));
    if let Some(prepared) = data.prepared() {
        lines_of(start, &prepared.meta, ["validate", "validates"], &mut lines);
    }
    for (index, text) in &data.stages {
        let part = format!("{start}stage {}: ", index + 1);
        // The run validates on its own text in all stages.
        lines_of(&part, &text.prepared.meta, ["are not trained on", "is not trained on"], &mut lines);
    }
    lines
}

/// How shards came into their folder, as a verb; and from where, if another folder had them.
pub(crate) fn taken(prepared: &Prepared) -> (&'static str, String) {
    match (&prepared.taken_from, prepared.reused) {
        (Some(other), _) => ("took", format!(" from {}", other.shown())),
        (None, true) => ("found", String::new()),
        (None, false) => ("wrote", String::new()),
    }
}

/// A warning when fewer than [`FEW_TOKENS`] tokens are held out.
pub(crate) fn too_little_held_out(meta: &PreparedMeta) -> Option<String> {
    let num_tokens = meta.validation.num_tokens;
    (num_tokens < FEW_TOKENS).then(|| {
        format!(
            "warning: {} held-out tokens are few: their mean loss is uncertain by more than {:.1} nats\n  \
             hint: name different text with [validation] paths, or hold more out by data.validation_fraction",
            thousands(num_tokens),
            3.0 / (num_tokens.max(1) as f64).sqrt()
        )
    })
}

/// Appends the lines about one text. `fates` is what happens to the held-out part: the predicate of "the last N % of
/// the text" and of "the end of the text".
fn lines_of(part: &str, meta: &PreparedMeta, fates: [&str; 2], lines: &mut Vec<String>) {
    let [are, is] = fates;
    if meta.is_cut && !meta.sources.is_empty() {
        lines.push(format!(
            "{part}of sources with too few documents to hold whole ones out, the end of the text {is} (to name \
             different text: [validation] paths)"
        ));
    } else if meta.is_cut {
        let (held_out, train) = (&meta.validation, &meta.train);
        let num_bytes = held_out.num_bytes + train.num_bytes + meta.report.also_held_out.num_bytes;
        let copies = if meta.report.also_held_out.num_documents > 0 { ", with copies" } else { "" };
        lines.push(format!(
            "{part}too few documents ({}{copies}) to hold whole ones out, so the last {:.1} % of the text {are} (to \
             name different text: [validation] paths)",
            thousands(meta.report.num_documents),
            100.0 * held_out.num_bytes as f64 / num_bytes.max(1) as f64
        ));
    }
    lines.extend(predicted(meta).map(|words| format!("{part}{words}")));
    left_out(part, &meta.report, lines);
    if let Some(report) = &meta.validation_report {
        left_out(&format!("{part}validation: "), report, lines);
    }
}

/// On how many of the training tokens loss is taken, where it is not on all, and how the tokens of chats were found.
pub(crate) fn predicted(meta: &PreparedMeta) -> Option<String> {
    let [num_predicted, num_tokens] = [meta.train.num_predicted?, meta.train.num_tokens].map(thousands);
    let how = match meta.chats.as_ref().map(|chats| chats.marks_answers) {
        None => "",
        Some(true) => ", as the chat template's {% generation %} blocks mark them",
        Some(false) => {
            ": the chat template has no {% generation %} blocks, so an answer is what its message adds to the chat \
             before it"
        }
    };
    Some(format!("loss on {num_predicted} of {num_tokens} tokens{how}"))
}

/// Appends the counts of blank, duplicate and invalid documents, of those that are also held out, and the first invalid
/// one. Appends nothing where no document was left out.
pub(crate) fn left_out(part: &str, report: &CorpusReport, lines: &mut Vec<String>) {
    if report.num_blank + report.num_duplicates + report.num_invalid > 0 {
        lines.push(format!(
            "{part}left out: {} blank, {} duplicates, {} invalid",
            thousands(report.num_blank),
            thousands(report.num_duplicates),
            thousands(report.num_invalid)
        ));
    }
    let also = &report.also_held_out;
    if also.num_documents > 0 {
        let documents = counted(also.num_documents, "document");
        lines.push(format!("{part}left out: {documents} that the validation text has, too"));
    }
    if also.num_shortened > 0 {
        let documents = counted(also.num_shortened, "document");
        lines.push(format!("{part}of {documents} the end is left out, because the validation text has it, too"));
    }
    if let Some(first) = &report.first_invalid {
        let first = first.lines().next().unwrap_or_default();
        lines.push(format!("  the first invalid one: {first}"));
    }
}
