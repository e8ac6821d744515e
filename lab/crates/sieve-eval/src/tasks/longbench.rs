//! Averages of scores as LongBench defines them (arXiv:2308.14508).
use super::TaskReport;
use serde::Serialize;

/// Prefix of the tasks' names: `longbench_hotpotqa` is the data set `hotpotqa`.
const PREFIX: &str = "longbench_";

/// The English data sets by category, as in LongBench's tables.
const CATEGORIES: [(&str, &[&str]); 6] = [
    ("single-document QA", &["narrativeqa", "qasper", "multifieldqa_en"]),
    ("multi-document QA", &["hotpotqa", "2wikimqa", "musique"]),
    ("summarization", &["gov_report", "qmsum", "multi_news"]),
    ("few-shot learning", &["trec", "triviaqa", "samsum"]),
    ("synthetic tasks", &["passage_count", "passage_retrieval_en"]),
    ("code completion", &["lcc", "repobench-p"]),
];

/// Averages of LongBench's scores, each between 0 and 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LongBenchAverage {
    /// Number of data sets measured; LongBench has 16 English ones.
    pub num_data_sets: usize,
    /// Mean over the data sets: what most papers print.
    pub mean: f64,
    /// Mean over the data sets of each category that has any.
    pub categories: Vec<(&'static str, f64)>,
    /// Mean over the categories: LongBench's own "overall".
    pub overall: f64,
}

impl LongBenchAverage {
    /// Averages the reports of LongBench's tasks; `None` without any.
    pub fn new(reports: &[TaskReport]) -> Option<Self> {
        let score = |name: &&str| {
            let report = reports.iter().find(|report| report.task.strip_prefix(PREFIX) == Some(*name))?;
            Some(report.scores.first()?.value)
        };
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let (mut all, mut categories) = (Vec::new(), Vec::new());
        for (category, names) in CATEGORIES {
            let scores: Vec<f64> = names.iter().filter_map(score).collect();
            if !scores.is_empty() {
                categories.push((category, mean(&scores)));
                all.extend(scores);
            }
        }
        let means: Vec<f64> = categories.iter().map(|(_, mean)| *mean).collect();
        (!all.is_empty()).then(|| Self {
            num_data_sets: all.len(),
            mean: mean(&all),
            categories,
            overall: mean(&means),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::{READY_TASKS, mean_of};

    #[test]
    fn the_mean_is_over_data_sets_and_the_overall_over_categories() {
        let report = |name: &str, value: f64| TaskReport {
            task: format!("{PREFIX}{name}"),
            num_rows: 1,
            fewshot: 0,
            num_truncated: 0,
            cuts_middle: true,
            scores: vec![mean_of("x", vec![value])],
            rows: Vec::new(),
        };
        let found = LongBenchAverage::new(&[report("lcc", 1.0), report("trec", 0.25), report("samsum", 0.0)]);
        let found = found.expect("three");
        assert_eq!((found.num_data_sets, found.categories.len()), (3, 2));
        assert!((found.mean - 1.25 / 3.0).abs() < 1e-12);
        assert_eq!(found.overall, (1.0 + 0.125) / 2.0);
        assert_eq!(LongBenchAverage::new(&[]), None);
        // Every LongBench task of the program has a category.
        let names = CATEGORIES.iter().flat_map(|(_, names)| names.iter().map(|name| format!("{PREFIX}{name}")));
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        let ready = READY_TASKS.iter().filter(|(name, _)| name.starts_with(PREFIX));
        let mut ready: Vec<&str> = ready.map(|(name, _)| *name).collect();
        ready.sort_unstable();
        assert_eq!(names, ready);
    }
}
