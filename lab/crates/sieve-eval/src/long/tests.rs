use super::*;
use crate::needle::tests::tokenizer;
use crate::test_model::llama_tokenizer;
use sieve_testing::refusal;
use std::collections::{BTreeMap, HashSet};

/// The text between two marks.
fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let (_, rest) = text.split_once(before).unwrap_or_else(|| panic!("no {before:?}"));
    rest.split_once(after).unwrap_or_else(|| panic!("no {after:?}")).0
}

/// A made-up haystack, and made-up questions in the form of SQuAD's file and of HotpotQA's.
fn source() -> LongSource {
    let squad = serde_json::json!({"data": (0..6).map(|article| serde_json::json!({"paragraphs": (0..4).map(|n| {
        let number = article * 4 + n;
        serde_json::json!({"context": format!("In year {number} the town {number} had mayor M{number}X."),
            "qas": [{"question": format!("Who was mayor of \
             town {number}?"), "answers": [{"text": format!("M{number}X")}, {"text": format!("mayor M{number}X")}]},
                {"question": "no?", "is_impossible": true, "answers": []}]})
    }).collect::<Vec<_>>()})).collect::<Vec<_>>()});
    let hotpot: Vec<_> = (0..20)
        .map(|n| {
            serde_json::json!({"question": format!("Where does river {n} end?"), "answer": format!("sea S{n}X"),
            "context": [[format!("River {n}"), [format!("River {n} flows. "), format!("It ends in sea \
             S{n}X.")]], ["Other", ["Nothing here."]]]})
        })
        .collect();
    let parse = |value: String| Some(QaData::parse("a file", &value).expect("published form"));
    LongSource {
        text: LongText::made_up(Split::Test),
        qa: [parse(squad.to_string()), parse(serde_json::Value::from(hotpot).to_string())],
    }
}

/// The first `count` samples of a task.
fn samples(name: &str, split: Split, size: Size, count: u64) -> Vec<LongSample> {
    let (task, source) = (LongTask::new(name).expect("a task"), source());
    let sample = |number| {
        let mut random = Random::new(split, 3, task.name(), size.length, number);
        task.sample(&source, &mut random, size)
    };
    (0..count).map(sample).collect()
}

/// The right answer, found in the prompt's text alone.
fn oracle(name: &str, prompt: &str) -> String {
    match name {
        "vt" => {
            // The question itself comes after the solved example.
            let (_, prompt) = prompt.rsplit_once("Memorize and track").expect("a question");
            let value = between(prompt, "assigned the value ", " in");
            let text = prompt.split("Question:").next().expect("a text");
            let words: Vec<&str> = text.split_whitespace().collect();
            let mut known = vec![value];
            let mut names = Vec::new();
            for at in 0..words.len() {
                if words[at] == "VAR" && words.get(at + 2) == Some(&"=") {
                    let from = if words[at + 3] == "VAR" { words[at + 4] } else { words[at + 3] };
                    if known.contains(&from) {
                        known.push(words[at + 1]);
                        names.push(words[at + 1]);
                    }
                }
            }
            names.join(" ")
        }
        "cwe" => {
            let (_, prompt) = prompt.rsplit_once("most often.\n").expect("a list");
            let text = prompt.split("\nQuestion").next().expect("a list");
            most_often(text.split(' ').filter(|word| !word.ends_with('.')), 10)
        }
        "fwe" => {
            let text = between(prompt, "coded words. ", "\nQuestion");
            most_often(text.split(' ').filter(|word| *word != "..."), 3)
        }
        "qa_1" => format!("M{}X", between(prompt, "mayor of town ", "?")),
        "qa_2" => {
            let number = between(prompt, "Where does river ", " end?");
            let river = between(prompt, &format!("River {number}\n"), "X.");
            format!("{}X", river.rsplit_once("in ").expect("an end").1)
        }
        "passkey" => between(prompt, "The pass key is ", ".").to_owned(),
        "kv_retrieval" => {
            let json = format!("{{{}}}", between(prompt, "{", "}"));
            let pairs: BTreeMap<String, String> = serde_json::from_str(&json).expect("JSON");
            pairs[between(prompt, "\n\nKey: \"", "\"")].clone()
        }
        "copy" | "select" => {
            let parts = prompt.split('[').skip(1);
            let words = parts.map(|part| part.split(']').next().expect("a word"));
            words.collect::<Vec<_>>().join(" ")
        }
        "induce" => {
            let words: Vec<&str> = prompt.split(' ').collect();
            let (last, before) = words.split_last().expect("words");
            let at = before.iter().position(|word| word == last).expect("twice");
            before[at + 1].to_owned()
        }
        _ => {
            let start = prompt.find("What are all").or_else(|| prompt.find("What is the"));
            let query = between(&prompt[start.expect("a question")..], " for ", " mentioned");
            let keys = query.replace(", and ", ", ");
            let values = keys.split(", ").flat_map(|key| {
                let mark = format!(" for {key} is: ");
                let parts: Vec<&str> = prompt.split(mark.as_str()).skip(1).collect();
                parts.into_iter().map(|part| part.split('.').next().expect("a value"))
            });
            values.collect::<Vec<_>>().join(" ")
        }
    }
}

/// The `count` most frequent words, joined by spaces.
fn most_often<'a>(words: impl Iterator<Item = &'a str>, count: usize) -> String {
    let mut counts = BTreeMap::new();
    for word in words {
        *counts.entry(word).or_insert(0) += 1;
    }
    let mut counts: Vec<(&str, i32)> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let words: Vec<&str> = counts[..count].iter().map(|(word, _)| *word).collect();
    words.join(" ")
}

#[test]
fn the_answer_of_every_task_is_in_its_text() {
    for name in LONG_TASKS {
        for length in [512, 2048, 8192] {
            for parts in [40, 200] {
                let size = Size { parts, length };
                for split in [Split::Test, Split::Train] {
                    for sample in samples(name, split, size, 12) {
                        let answer = oracle(name, &sample.prompt);
                        let score = sample.matching.score(&answer, &sample.references);
                        assert_eq!(score, 1.0, "{name} {answer}: {sample:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_answers_are_ten_others_that_the_text_does_not_hold() {
    let size = Size { parts: 60, length: 2048 };
    for name in LONG_TASKS {
        for sample in samples(name, Split::Test, size, 8) {
            let different: HashSet<&String> = sample.wrong.iter().chain(&sample.references[..1]).collect();
            assert_eq!(different.len(), NUM_WRONG + 1, "{name}: {:?}", sample.wrong);
            for wrong in &sample.wrong {
                assert!(!sample.references.contains(wrong), "{name}: {wrong}");
                // In question tasks, the documents may hold the answers of other questions.
                assert!(name.starts_with("qa") || !sample.prompt.contains(wrong), "{name}: {wrong}");
            }
        }
    }
}

#[test]
fn samples_repeat_and_differ_by_number_and_split() {
    let size = Size { parts: 50, length: 1024 };
    for name in LONG_TASKS {
        let (a, b) = (samples(name, Split::Test, size, 5), samples(name, Split::Test, size, 5));
        assert_eq!(a, b, "{name}");
        let train = samples(name, Split::Train, size, 5);
        let all: HashSet<&String> = a.iter().chain(&train).map(|sample| &sample.prompt).collect();
        // A question of a file may come twice, but its documents are then in another order.
        assert_eq!(all.len(), 10, "{name}");
    }
}

#[test]
fn needles_have_the_number_of_their_task_and_uniform_depths() {
    let size = Size { parts: 100, length: 2048 };
    // Each case: a task and its numbers of needles, keys and references.
    for (name, needles, keys, references) in [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 4, 1),
        ("niah_multikey_2", 101, 101, 1),
        ("niah_multikey_3", 101, 101, 1),
        ("niah_multivalue", 4, 1, 4),
        ("niah_multiquery", 4, 4, 4),
    ] {
        let mut depths = Vec::new();
        for sample in samples(name, Split::Test, size, 400) {
            let found = sample.prompt.split("One of the special magic ").skip(1);
            let found: Vec<&str> = found.collect();
            assert_eq!(found.len(), needles, "{name}");
            let found_keys = found.iter().map(|one| between(one, " for ", " is: "));
            let found_keys: HashSet<&str> = found_keys.collect();
            // In a haystack of needles, some needles may have the same key.
            assert!(found_keys.len() + 8 > keys && found_keys.len() <= keys, "{name}");
            assert_eq!(sample.references.len(), references, "{name}");
            let uuids = ["niah_single_3", "niah_multikey_3"].contains(&name);
            for value in &sample.references {
                if uuids {
                    assert_eq!(value.len(), 36)
                } else {
                    assert!((1_000_000..10_000_000).contains(&value.parse().expect("a number")))
                }
            }
            let mentions_noise = sample.prompt.contains("There and back again.");
            assert_eq!(mentions_noise, name == "niah_single_1");
            depths.extend(sample.depth);
        }
        assert_eq!(depths.len(), if references == 1 { 400 } else { 0 }, "{name}");
        if references == 1 {
            let mean = depths.iter().sum::<f64>() / 400.0;
            // 6 is four standard deviations of the mean of 400 uniform depths.
            assert!((mean - 50.0).abs() < 6.0, "{name}: {mean}");
            // Uniform depths from 0 to 100 have a standard deviation of 28.9.
            let spread = depths.iter().map(|depth| (depth - mean).powi(2)).sum::<f64>() / 400.0;
            assert!((spread.sqrt() - 28.9).abs() < 3.0, "{name}: {spread}");
        }
    }
}

#[test]
fn words_are_as_frequent_as_their_task_says() {
    let counts = |text: &str| {
        let mut counts = BTreeMap::<String, usize>::new();
        for word in text.split(' ') {
            *counts.entry(word.to_owned()).or_default() += 1;
        }
        counts
    };
    for (length, often, seldom) in [(2048, 6, 1), (8192, 30, 3)] {
        let size = Size { parts: 90, length };
        for sample in samples("cwe", Split::Test, size, 5) {
            // The list itself comes after the solved example.
            let (_, list) = sample.prompt.rsplit_once("most often.\n").expect("a list");
            let list = list.split("\nQuestion").next().expect("a list");
            let mut words = counts(list);
            words.retain(|word, _| !word.ends_with('.'));
            assert_eq!(words.len(), 90);
            for (word, count) in words {
                let is_asked = sample.references.contains(&word);
                assert_eq!(count, if is_asked { often } else { seldom }, "{word}");
            }
            assert_eq!(sample.references.len(), 10);
        }
    }
    let size = Size { parts: 1000, length: 4000 };
    for sample in samples("fwe", Split::Test, size, 5) {
        let mut found: Vec<(String, usize)> =
            counts(between(&sample.prompt, "coded words. ", "\nQuestion")).into_iter().collect();
        found.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        // The word of rank k occurs 1000 k^-2 6/pi^2 times, rounded down: 0 times beyond rank 24.
        let top: Vec<usize> = found.iter().take(5).map(|(_, count)| *count).collect();
        assert_eq!(top, [607, 151, 67, 37, 24]);
        assert_eq!((found[0].0.as_str(), found.len()), ("...", 24));
        let asked: Vec<&String> = found[1..4].iter().map(|(word, _)| word).collect();
        assert_eq!(sample.references.iter().collect::<Vec<_>>(), asked);
    }
    // The three words that are asked for are the only answer at every size, however few words there are.
    for parts in lists::FEWEST_CODED..120 {
        for sample in samples("fwe", Split::Test, Size { parts, ..size }, 2) {
            let counts = counts(between(&sample.prompt, "coded words. ", "\nQuestion"));
            let asked = sample.references.iter().map(|word| counts[word]).min().expect("three");
            let others = counts.iter().filter(|(word, _)| !sample.references.contains(word) && *word != "...");
            assert!(others.map(|(_, count)| *count).max() < Some(asked), "{parts}: {counts:?}");
        }
    }
}

#[test]
fn variables_form_one_chain_in_order() {
    for (length, examples) in [(512, 0), (2048, 1), (8192, 1)] {
        let size = Size { parts: 30, length };
        for sample in samples("vt", Split::Test, size, 20) {
            assert_eq!(sample.references.len(), 5);
            assert!(sample.references.iter().all(|name| name.len() == 5));
            let (example, text) = sample.prompt.rsplit_once("Memorize and track").expect("a question");
            assert_eq!(example.matches("Memorize and track").count(), examples);
            // Five assignments, of which four name another variable.
            assert_eq!(text.matches("VAR ").count(), 9);
            let places: Vec<usize> = (sample.references.iter())
                .map(|name| text.find(&format!("VAR {name} = ")).expect("assigned"))
                .collect();
            assert!(places.is_sorted(), "{places:?}");
        }
    }
}

#[test]
fn the_remaining_tasks_have_the_number_of_parts_asked_for() {
    let size = Size { parts: 75, length: 4096 };
    for sample in samples("kv_retrieval", Split::Test, size, 10) {
        assert_eq!(sample.prompt.matches("\": \"").count(), 75);
        assert_eq!(sample.references[0].len(), 36);
    }
    for sample in samples("copy", Split::Test, size, 10) {
        let end = sample.prompt.find(text::NOISE).expect("noise");
        assert_eq!(sample.prompt[..end].matches('[').count(), 8);
    }
    let mut before_half = 0;
    for sample in samples("select", Split::Test, size, 50) {
        let half = sample.prompt.len() / 2;
        before_half += sample.prompt[..half].matches('[').count();
        assert_eq!(sample.prompt.matches('[').count(), 8);
    }
    // Of 400 words half are expected; 50 is five standard deviations.
    assert!((150..250).contains(&before_half), "{before_half}");
    for sample in samples("induce", Split::Test, size, 10) {
        let words: Vec<&str> = sample.prompt.split(' ').collect();
        let different: HashSet<&str> = words.iter().copied().collect();
        // 75 parts are 76 different words, of which one comes again at the end.
        assert_eq!((words.len(), different.len()), (77, 76));
    }
    for sample in samples("passkey", Split::Test, size, 10) {
        assert_eq!(sample.references[0].len(), 5);
        assert_eq!(sample.prompt.matches(text::NOISE).count(), 75);
    }
    for name in ["qa_1", "qa_2"] {
        for sample in samples(name, Split::Test, Size { parts: 9, ..size }, 10) {
            assert_eq!(sample.prompt.matches("Document ").count(), 9, "{name}");
            assert_eq!(sample.matching, Match::Any);
            // HotpotQA does not mark the document with the answer, so it has no depth.
            assert_eq!(sample.depth.is_some(), name == "qa_1");
        }
    }
}

#[test]
fn texts_fill_their_length() {
    let (tokenizer, source) = (tokenizer(), source());
    for name in LONG_TASKS {
        let task = LongTask::new(name).expect("a task");
        for length in [3000, 8192] {
            let texts = long_texts(task, &source, &tokenizer, (Split::Test, 1), length, 0..3);
            let texts = texts.unwrap_or_else(|e| panic!("{name}: {e}"));
            for (sample, tokens) in &texts.samples {
                let room = length - task.max_new_tokens();
                assert_eq!(&tokenizer.encode(&sample.prompt).expect("bytes"), tokens);
                assert!(tokens.len() <= room, "{name}");
                // The question files are short, so their texts may be shorter.
                let filled = tokens.len() as f64 / room as f64;
                assert!(filled > 0.93 || name.starts_with("qa"), "{name} {length}: {filled}");
            }
        }
    }
}

#[test]
fn a_bos_token_is_part_of_the_length_where_the_template_puts_one() {
    let (llama, task) = (llama_tokenizer(), LongTask::new("passkey").expect("a task"));
    // Test prompts begin with the BOS token; training texts have none.
    for (split, bos) in [(Split::Test, Some(1)), (Split::Train, None)] {
        let texts = long_texts(task, &source(), &llama, (split, 1), 1500, 0..3).expect("room");
        for (sample, tokens) in &texts.samples {
            let text = llama.encode(&sample.prompt).expect("bytes");
            assert!(tokens.iter().eq(bos.iter().chain(&text)), "{split:?}");
            assert!(tokens.len() <= 1500 - task.max_new_tokens(), "{split:?}");
        }
    }
}

#[test]
fn match_all_scores_the_share_of_references_and_match_any_one_of_them() {
    let references = ["Ab".to_owned(), "cd".to_owned()];
    for (text, all, any) in [("x", 0.0, 0.0), ("aB", 0.5, 1.0), ("cdAB", 1.0, 1.0)] {
        assert_eq!(Match::All.score(text, &references), all);
        assert_eq!(Match::Any.score(text, &references), any);
    }
}

/// `ruler_scores.json` is what lm-evaluation-harness gives to the same answers (tests/python/ruler_scores.py).
#[test]
fn scores_agree_with_lm_evaluation_harness() {
    #[derive(serde::Deserialize)]
    struct Case {
        task: String,
        text: String,
        references: Vec<String>,
        value: f64,
    }
    let cases = include_str!("../../../../../tests/golden/ruler_scores.json");
    let cases: Vec<Case> = serde_json::from_str(cases).expect("cases");
    assert_eq!(cases.len(), 416);
    for case in cases {
        let matching = if case.task.starts_with("qa_") { Match::Any } else { Match::All };
        let score = matching.score(&case.text, &case.references);
        let (task, text, references) = (case.task, case.text, case.references);
        assert!((score - case.value).abs() < 1e-12, "{task} {text:?} {references:?} {score}");
    }
}

#[test]
fn unknown_tasks_short_lengths_and_bad_files_are_refused() {
    refusal(LongTask::new("niah_singel_1"), "did you mean niah_single_1?");
    let (tokenizer, mut source) = (tokenizer(), source());
    let made = |name: &str, source: &LongSource, length| {
        let task = LongTask::new(name).expect("a task");
        long_texts(task, source, &tokenizer, (Split::Test, 1), length, 0..1)
    };
    let error = refusal(made("cwe", &source, 200), "the length is 200 | --lengths");
    let needed = error.split("takes ").nth(1).and_then(|rest| rest.split(' ').next());
    let needed: usize = needed.and_then(|n| n.parse().ok()).expect("a number");
    // 40 tokens more than the shortest, since samples differ in length.
    made("cwe", &source, needed + 40).expect("it fits");
    source.qa = [None, None];
    refusal(made("qa_2", &source, 4096), "--qa-2");
    for (text, words) in [("{}", "missing field"), ("[]", "no question"), ("x", "expected")] {
        refusal(QaData::parse("a.json", text), &format!("{words} | a.json"));
    }
}

#[test]
fn prose_is_cut_after_each_sentence() {
    let text = LongText::prose("a".to_owned(), "One two.\n Three 1.5 four?  Five");
    assert_eq!(text.parts, ["One two.", "Three 1.5 four?", "Five"]);
    assert_eq!(text.first(4), ["One two.", "Three 1.5 four?", "Five", "One two."]);
    let code = LongText::code("b".to_owned(), "fn a() {\n\n}");
    assert_eq!((code.parts.len(), code.joint), (3, "\n"));
}
