//! LongBench's scores (arXiv:2308.14508) of a generated text against a reference, from 0 to 1. They equal the scores of
//! lm-evaluation-harness's scorer, which uses `rouge` 1.0.1 and `fuzzywuzzy` on Python's difflib.
use serde::Deserialize;
use std::collections::{HashMap, HashSet};

/// The metric that scores a generated text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TextScore {
    /// 1 if the text equals one of the right answers, else 0.
    #[default]
    ExactMatch,
    /// F1 of the words, without articles and punctuation.
    QaF1,
    /// F1 of ROUGE-L over sentences.
    RougeL,
    /// 1 over the number of classes that the text names, if the right one is among them; else 0.
    Classification,
    /// Share of the text's numbers that equal the paragraph's number.
    Retrieval,
    /// Share of the text's numbers that equal the count.
    Count,
    /// Edit similarity of the first line of code, in whole percent.
    CodeSimilarity,
}

impl TextScore {
    /// Name of the metric, as in lm-evaluation-harness.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ExactMatch => "exact_match",
            Self::QaF1 => "qa_f1_score",
            Self::RougeL => "rouge_score",
            Self::Classification => "classification_score",
            Self::Retrieval => "retrieval_score",
            Self::Count => "count_score",
            Self::CodeSimilarity => "code_sim_score",
        }
    }

    /// The best score over the answers. `classes` are all classes of a classification.
    pub(super) fn best(self, text: &str, answers: &[String], classes: &[String]) -> f64 {
        // In code, indentation must stay.
        let text = match self {
            Self::CodeSimilarity => text,
            _ => text.trim(),
        };
        let score = |answer: &String| match self {
            Self::ExactMatch => f64::from(u8::from(text == answer)),
            Self::QaF1 => f1(&qa_words(text), &qa_words(answer)),
            Self::RougeL => rouge_l(text, answer),
            Self::Classification => classification(text, answer, classes),
            Self::Retrieval => share_of_numbers(text, numbers(answer).next().unwrap_or_default()),
            Self::Count => share_of_numbers(text, answer),
            Self::CodeSimilarity => code_similarity(text, answer),
        };
        answers.iter().map(score).fold(0.0, f64::max)
    }
}

/// Lower-case words without ASCII punctuation and without articles.
fn qa_words(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let kept = text.chars().filter(|c| !c.is_ascii_punctuation());
    let (mut out, mut word) = (String::new(), String::new());
    // A run of letters and digits that is an article becomes a space.
    let end = |word: &mut String, out: &mut String| {
        if ["a", "an", "the"].contains(&word.as_str()) {
            out.push(' ')
        } else {
            out.push_str(word)
        }
        word.clear();
    };
    for c in kept {
        if c.is_alphanumeric() {
            word.push(c)
        } else {
            end(&mut word, &mut out);
            out.push(c);
        }
    }
    end(&mut word, &mut out);
    out.split_whitespace().map(str::to_owned).collect()
}

/// F1 of the words that both have, each counted as often as both have it.
fn f1(text: &[String], answer: &[String]) -> f64 {
    let mut left = HashMap::<&str, usize>::new();
    for word in answer {
        *left.entry(word.as_str()).or_default() += 1;
    }
    let takes = |word: &&String| match left.get_mut(word.as_str()) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    };
    let same = text.iter().filter(takes).count() as f64;
    if same == 0.0 {
        return 0.0;
    }
    let (precision, recall) = (same / text.len() as f64, same / answer.len() as f64);
    2.0 * precision * recall / (precision + recall)
}

/// Splits into sentences at each dot, and these into words. As in `rouge`, white space between two dots is a sentence
/// of one empty word.
fn sentences(text: &str) -> Vec<Vec<&str>> {
    let parts = text.split('.').filter(|part| !part.is_empty());
    let words = parts.map(|part| -> Vec<&str> { part.split_whitespace().collect() });
    words.map(|words| if words.is_empty() { vec![""] } else { words }).collect()
}

/// ROUGE-L F1. Each word counts once, as `rouge` works on sets.
fn rouge_l(text: &str, answer: &str) -> f64 {
    let (text, answer) = (sentences(text), sentences(answer));
    if text.is_empty() || answer.is_empty() {
        return 0.0;
    }
    let unique = |sentences: &[Vec<&str>]| -> usize {
        let words: HashSet<&str> = sentences.iter().flatten().copied().collect();
        words.len()
    };
    let mut union = HashSet::new();
    for reference in &answer {
        for sentence in &text {
            union.extend(longest_common(reference, sentence));
        }
    }
    let common = union.len() as f64;
    let (recall, precision) = (common / unique(&answer) as f64, common / unique(&text) as f64);
    2.0 * (precision * recall / (precision + recall + 1e-8))
}

/// A longest common subsequence: of several, the one that `rouge` finds.
fn longest_common<'a>(x: &[&'a str], y: &[&str]) -> Vec<&'a str> {
    let width = y.len() + 1;
    // Entry (i, j): length of the longest common subsequence of the first i words of x and the first j of y.
    let mut table = vec![0u32; (x.len() + 1) * width];
    for i in 1..=x.len() {
        for j in 1..=y.len() {
            table[i * width + j] = if x[i - 1] == y[j - 1] {
                table[(i - 1) * width + j - 1] + 1
            } else {
                table[(i - 1) * width + j].max(table[i * width + j - 1])
            };
        }
    }
    // From the end, along the entries that the lengths came from.
    let (mut i, mut j, mut found) = (x.len(), y.len(), Vec::new());
    while i > 0 && j > 0 {
        if x[i - 1] == y[j - 1] {
            found.push(x[i - 1]);
            (i, j) = (i - 1, j - 1);
        } else if table[(i - 1) * width + j] > table[i * width + j - 1] {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    found
}

/// [`TextScore::Classification`], for one right class.
fn classification(text: &str, answer: &str, classes: &[String]) -> f64 {
    let mut named: Vec<&String> = classes.iter().filter(|class| text.contains(*class)).collect();
    // A class whose name is part of the right class's name does not count against it. LongBench's scorer removes
    // entries from the list that it iterates over, and so skips the entry after each removed entry.
    let mut at = 0;
    while at < named.len() {
        if answer.contains(named[at].as_str()) && named[at] != answer {
            let class = named[at];
            let first = named.iter().position(|one| *one == class);
            named.remove(first.unwrap_or(at));
        }
        at += 1;
    }
    if named.iter().any(|class| *class == answer) { 1.0 / named.len() as f64 } else { 0.0 }
}

/// The runs of digits in a text.
fn numbers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_digit()).filter(|run| !run.is_empty())
}

/// Share of the numbers in `text` that equal `answer`.
fn share_of_numbers(text: &str, answer: &str) -> f64 {
    let all: Vec<&str> = numbers(text).collect();
    let right = all.iter().filter(|number| **number == answer).count();
    right as f64 / all.len().max(1) as f64
}

/// Edit similarity of the first line of code: one that is not blank and contains neither a backtick nor a comment mark.
fn code_similarity(text: &str, answer: &str) -> f64 {
    let is_code = |line: &&str| {
        let marks = ["`", "#", "//"];
        !line.trim().is_empty() && !marks.iter().any(|mark| line.contains(mark))
    };
    let line = text.split('\n').find(is_code).unwrap_or("");
    if line.is_empty() || answer.is_empty() {
        return 0.0;
    }
    let (a, b): (Vec<char>, Vec<char>) = (line.chars().collect(), answer.chars().collect());
    let ratio = 2.0 * matching(&a, &b) as f64 / (a.len() + b.len()) as f64;
    // fuzzywuzzy gives whole per cents.
    (100.0 * ratio).round_ties_even() / 100.0
}

/// Number of characters that Python's `difflib.SequenceMatcher` matches.
fn matching(a: &[char], b: &[char]) -> usize {
    let mut places = HashMap::<char, Vec<usize>>::new();
    for (at, &c) in b.iter().enumerate() {
        places.entry(c).or_default().push(at);
    }
    // In long texts, difflib starts no match at "popular" characters: characters in more than 1 % of the places.
    if b.len() >= 200 {
        places.retain(|_, places| places.len() <= b.len() / 100 + 1);
    }
    // Pairs of ranges that are still to be matched: around the longest match, the text before it and after it.
    let mut open = vec![[0, a.len(), 0, b.len()]];
    let mut matched = 0;
    while let Some([a_first, a_end, b_first, b_end]) = open.pop() {
        let (mut best_a, mut best_b, mut size) = (a_first, b_first, 0);
        // Length of the match that ends at the character before i and at each j.
        let mut lengths = HashMap::<usize, usize>::new();
        for (i, c) in a.iter().enumerate().take(a_end).skip(a_first) {
            let mut next = HashMap::new();
            let inside = places.get(c).map_or(&[][..], Vec::as_slice).iter();
            for &j in inside.filter(|&&j| (b_first..b_end).contains(&j)) {
                let before = j.checked_sub(1).and_then(|j| lengths.get(&j));
                let length = before.copied().unwrap_or(0) + 1;
                next.insert(j, length);
                if length > size {
                    (best_a, best_b, size) = (i + 1 - length, j + 1 - length, length);
                }
            }
            lengths = next;
        }
        while best_a > a_first && best_b > b_first && a[best_a - 1] == b[best_b - 1] {
            (best_a, best_b, size) = (best_a - 1, best_b - 1, size + 1);
        }
        while best_a + size < a_end && best_b + size < b_end && a[best_a + size] == b[best_b + size] {
            size += 1;
        }
        if size > 0 {
            matched += size;
            open.push([a_first, best_a, b_first, best_b]);
            open.push([best_a + size, a_end, best_b + size, b_end]);
        }
    }
    matched
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scores are those of lm-evaluation-harness's `longbench/metrics.py`, stored by
    /// tests/python/longbench_scores.py.
    #[test]
    fn scores_agree_with_the_longbench_scorer_of_lm_evaluation_harness() {
        let golden: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("../../../../../tests/golden/longbench_scores.json")).expect("JSON");
        assert!(golden.len() > 200);
        let mut between = HashMap::<String, usize>::new();
        for case in &golden {
            let texts = |name: &str| -> Vec<String> { serde_json::from_value(case[name].clone()).expect("texts") };
            let score: TextScore = serde_json::from_value(case["score"].clone()).expect("a score");
            let text = case["text"].as_str().expect("a text");
            let found = score.best(text, &texts("answers"), &texts("classes"));
            let value = case["value"].as_f64().expect("a number");
            assert!((found - value).abs() < 1e-9, "{case}: {found}");
            let counts = between.entry(score.name().to_owned()).or_default();
            *counts += usize::from(value > 0.0 && value < 1.0);
        }
        // Each kind of score has cases strictly between 0 and 1.
        assert_eq!(between.len(), 6);
        assert!(between.values().all(|&count| count >= 5), "{between:?}");
    }
}
