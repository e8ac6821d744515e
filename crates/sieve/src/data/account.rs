//! What became of a corpus's documents, in lines for the terminal.
use crate::terminal::thousands;
use sieve_data::{CorpusReport, PreparedMeta};

/// How documents were held out where that is not the usual way, and what was left out. `part` names a stage, or is
/// empty.
pub(crate) fn lines(part: &str, meta: &PreparedMeta) -> Vec<String> {
    let mut lines = Vec::new();
    if meta.is_cut {
        let (held_out, train) = (&meta.validation, &meta.train);
        let num_bytes = held_out.num_bytes + train.num_bytes;
        lines.push(format!(
            "{part}too few documents ({}) to hold whole ones out, so the last {:.1} % of the text validate (to name \
             other \
             text: [validation] paths)",
            thousands(meta.report.num_documents),
            100.0 * held_out.num_bytes as f64 / num_bytes.max(1) as f64
        ));
    }
    left_out(part, &meta.report, &mut lines);
    if let Some(report) = &meta.validation_report {
        left_out(&format!("{part}validation: "), report, &mut lines);
    }
    lines
}

/// What was left out, if anything.
pub(crate) fn left_out(part: &str, report: &CorpusReport, lines: &mut Vec<String>) {
    if report.num_blank + report.num_duplicates + report.num_invalid > 0 {
        lines.push(format!(
            "{part}left out: {} blank, {} duplicates, {} invalid",
            thousands(report.num_blank),
            thousands(report.num_duplicates),
            thousands(report.num_invalid)
        ));
    }
    if let Some(first) = &report.first_invalid {
        let first = first.lines().next().unwrap_or_default();
        lines.push(format!("  the first invalid one: {first}"));
    }
}
