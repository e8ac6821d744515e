use super::likelihood::{Pair, likelihoods, score_after_contexts};
use super::*;
use crate::test_model::{llama_tokenizer, tiny_model};
use burn_flex::{Flex, FlexDevice};
use sieve_core::{Attention, DmaShape};
use sieve_infer::{GenerateConfig, Generator, Sampling, logits};
use sieve_nn::Qwen3;
use sieve_testing::refusal;

/// A tokenizer of 31 tokens, too few for bytes: its tokens are words, separated by white space.
fn tokenizer() -> Tokenizer {
    let vocab: serde_json::Map<String, serde_json::Value> = (0..30u32)
        .map(|id| (format!("t{id}"), id.into()))
        .chain([("<|endoftext|>".to_owned(), 30u32.into())])
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    });
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, json.to_string()).expect("writable");
    Tokenizer::from_file(&path).expect("a tokenizer")
}

fn rows(lines: &[String]) -> Vec<TableRow> {
    let rows = lines.iter().map(|line| serde_json::from_str(line));
    rows.collect::<Result<_, _>>().expect("objects")
}

/// Rows with PIQA's columns and texts of several lengths.
fn piqa(num_rows: usize) -> Vec<TableRow> {
    let text = |n: usize, len: usize| text_of((0..len).map(|k| (n * 7 + k * k * 3 + k) % 30));
    let row = |n: usize| {
        let (goal, one, two) = (text(n, 1 + n % 9), text(n + 1, 1 + n % 4), text(n + 2, 2 + n % 3));
        format!(r#"{{"goal": "{goal}", "sol1": "{one}", "sol2": "{two}", "label": {}}}"#, n % 2)
    };
    rows(&(0..num_rows).map(row).collect::<Vec<_>>())
}

/// The report of a ready task, asked of a tiny model.
fn ask(attention: Attention, task: &str, data: &TaskRows, run: TaskRun) -> Result<TaskReport, EvalError> {
    let tokenizer = tokenizer();
    let (model, device) = (tiny_model(attention, 64), Default::default());
    let model = task_model(&model, &tokenizer, &device);
    let task = Task::ready(task).expect("ready");
    let texts = TaskTexts::new(&task, data, run, None, &tokenizer, 64)?;
    run_task(&model, &texts, None, &mut |_, _| {})
}

fn task_model<'a>(model: &'a Qwen3<Flex>, tokenizer: &'a Tokenizer, device: &'a FlexDevice) -> TaskModel<'a, Flex> {
    TaskModel { model, tokenizer, ends: &[30], device }
}

/// Encodes a text that is no chat.
const PLAIN: likelihood::Encode = Tokenizer::encode_with_bos;
const ZERO_SHOT: TaskRun = TaskRun { fewshot: 0, limit: None, truncate: false };
/// Long texts are cut instead of refused.
const CUT: TaskRun = TaskRun { truncate: true, ..ZERO_SHOT };

fn without_examples(rows: Vec<TableRow>) -> TaskRows {
    TaskRows { rows, examples: None }
}

/// Tokens of the tokenizer's list, as text.
fn text_of(tokens: impl Iterator<Item = usize>) -> String {
    let words: Vec<String> = tokens.map(|token| format!("t{token}")).collect();
    words.join(" ")
}

/// `len` words that neither repeat in a row nor ascend.
fn mixed(from: usize, len: usize) -> String {
    text_of((from..from + len).map(|k| k * k % 30))
}

#[test]
fn packed_pairs_get_the_likelihoods_that_each_has_alone() {
    let tokenizer = tokenizer();
    let device = Default::default();
    for attention in [Attention::Mha, Attention::swa(3)] {
        let model = tiny_model(attention, 64);
        let pairs: Vec<Pair> = (0..40)
            .map(|n| {
                let ending = format!(" {}", mixed(n + 9, 1 + n % 5));
                let pair = Pair::encode(&tokenizer, PLAIN, 30, [&mixed(n, n % 7), &ending]);
                pair.expect("known words").expect("something to score")
            })
            .collect();
        let asked = task_model(&model, &tokenizer, &device);
        let questions: Vec<Vec<Pair>> = pairs.iter().map(|pair| vec![pair.clone()]).collect();
        let found = likelihoods(&asked, &questions, true, None, &mut |_| {}).expect("finite");
        for (pair, found) in pairs.iter().zip(&found) {
            let (tokens, num_scored) = pair.parts();
            let inputs = &tokens[..tokens.len() - 1];
            let logits: Vec<f32> = logits(&model, inputs, &device).expect("known").to_vec().expect("f32");
            let (mut expected, mut greedy) = (0.0, true);
            for at in inputs.len() - num_scored..inputs.len() {
                // The vocabulary has 31 tokens.
                let row = &logits[at * 31..(at + 1) * 31];
                let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                let label = tokens[at + 1] as usize;
                expected += f64::from(row[label]) - sum.ln();
                greedy &= row.iter().all(|&x| x <= row[label]);
            }
            assert!((found.log_likelihood - expected).abs() < 1e-4, "{found:?} {expected}");
            assert_eq!(found.num_tokens, num_scored);
            assert_eq!(found.is_greedy, Some(greedy));
        }
    }
}

#[test]
fn accuracy_is_the_share_of_rows_whose_right_choice_is_likeliest() {
    let data = without_examples(piqa(60));
    let report = ask(Attention::Mha, "piqa", &data, ZERO_SHOT).expect("scores");
    let names: Vec<&str> = report.scores.iter().map(|score| score.name).collect();
    assert_eq!(names, ["acc", "acc_norm", "acc_bytes"]);
    let right = report.rows.iter().filter(|row| {
        let [one, two] = &row.likelihoods[..] else { panic!("two choices") };
        usize::from(two.log_likelihood > one.log_likelihood) == row.label.expect("a label")
    });
    let acc = right.count() as f64 / 60.0;
    assert!(acc > 0.0 && acc < 1.0, "{acc}");
    assert_eq!(report.scores[0].value, acc);
    assert_ne!(report.scores[1].value, acc);
    let limited = TaskRun { limit: Some(7), ..ZERO_SHOT };
    let first = ask(Attention::Mha, "piqa", &data, limited).expect("scores");
    assert_eq!(first.num_rows, 7);
    for (found, expected) in first.rows.iter().zip(&report.rows) {
        for (a, b) in found.likelihoods.iter().zip(&expected.likelihoods) {
            assert!((a.log_likelihood - b.log_likelihood).abs() < 1e-5);
        }
    }
}

#[test]
fn examples_are_the_first_rows_and_never_the_row_asked() {
    let (task, rows) = (Task::ready("piqa").expect("ready"), piqa(3));
    let shot = |n: usize| task.shot(&rows[n]).expect("an example");
    let data = without_examples(rows.clone());
    let before = |n: usize, fewshot| shots(&task, &data, fewshot, &rows[n]);
    assert_eq!(before(2, 2).expect("two"), [shot(0), shot(1)]);
    assert_eq!(before(0, 2).expect("two"), [shot(1), shot(2)]);
    assert!(before(0, 0).expect("none").is_empty());
    refusal(before(0, 3), "3 examples | 2 rows");
    let other = TaskRows { rows: piqa(1), examples: Some(piqa(3)) };
    let found = shots(&task, &other, 2, &rows[0]).expect("two");
    assert_eq!(found, [shot(0), shot(1)]);
}

#[test]
fn long_texts_are_refused_or_cut_at_their_beginning() {
    let long = |len: usize| {
        let text = text_of((0..len).map(|n| n % 29));
        without_examples(rows(&[format!(r#"{{"text": "{text}"}}"#)]))
    };
    let fits = ask(Attention::Mha, "lambada_openai", &long(65), ZERO_SHOT).expect("64 go in");
    assert_eq!(fits.num_truncated, 0);
    let words = "row 1 has a sequence of 89 tokens, and the model's context has room for 64";
    refusal(ask(Attention::Mha, "lambada_openai", &long(90), ZERO_SHOT), words);
    let report = ask(Attention::Mha, "lambada_openai", &long(90), CUT).expect("cut");
    assert_eq!(report.num_truncated, 1);
    let nats = -report.rows[0].likelihoods[0].log_likelihood;
    assert!((report.scores[0].value - nats.exp()).abs() < 1e-9);
}

/// Rows in LongBench's published form get a score between 0 and 1, and long prompts lose their middle.
#[test]
fn long_prompts_lose_their_middle_and_texts_are_scored() {
    let row = |context: &str| {
        let row = serde_json::json!({"context": context, "input": "t3", "answers": ["t5 t6", "x"],
            "all_classes": null, "length": 3, "dataset": "hotpotqa"});
        without_examples(rows(&[row.to_string()]))
    };
    let (tokenizer, context) = (tokenizer(), 64 + 32);
    let task = Task::ready("longbench_hotpotqa").expect("ready");
    let row = row(&text_of((0..200).map(|n| n % 30)));
    let texts = TaskTexts::new(&task, &row, CUT, None, &tokenizer, context).expect("cut");
    let Texts::Prompts(prompts) = &texts.texts else { panic!("prompts") };
    let question = task.questions(&row.rows).expect("columns");
    let whole = tokenizer.encode(&question[0].prompts[0]).expect("words");
    let ends = [&whole[..32], &whole[whole.len() - 32..]].concat();
    assert_eq!((&prompts[0], texts.num_truncated), (&ends, 1));
    let score = |text: &str| task.matching.score(text, &question[0].endings, &[]);
    assert_eq!(score(" t5 T6."), Some(1.0));
    assert_eq!(score("t5 t9"), Some(0.5));
    let line = Task::ready("longbench_samsum").expect("ready");
    let found = line.matching.score("\n\nx y\nz", &["x y".to_owned()], &[]);
    assert_eq!(found.map(f64::round), Some(1.0));
    let exact = Task::ready("triviaqa").expect("ready");
    assert_eq!(exact.matching.score("x", &["x".to_owned()], &[]), None);
    let mean = mean_of("x", vec![0.0, 1.0, 0.5]);
    // The three values have a sample variance of 0.25.
    assert_eq!((mean.value, mean.stderr), (0.5, Some((0.25f64 / 3.0).sqrt())));
}

/// Each data set has prompts shorter than half the context, longer than half, and longer than the context.
#[test]
fn every_longbench_task_takes_short_and_long_prompts() {
    let tokenizer = tokenizer();
    let (model, device) = (tiny_model(Attention::Mha, 1024), Default::default());
    let asked = task_model(&model, &tokenizer, &device);
    let names = READY_TASKS.iter().map(|(name, _)| *name);
    let names: Vec<&str> = names.filter(|name| name.starts_with("longbench_")).collect();
    assert_eq!(names.len(), 16);
    for name in names {
        let task = Task::ready(name).expect("ready");
        let room = 1024 - task.matching.max_new_tokens;
        let row = |len: usize| {
            serde_json::json!({"context": text_of((0..len).map(|n| n % 30)), "input": "t3", "answers": ["t5 t6"],
                "all_classes": ["t5", "t6"], "length": len, "dataset": name})
            .to_string()
        };
        let lengths = [1, room * 2 / 3, room + 70];
        let data = without_examples(rows(&lengths.map(row)));
        let texts = TaskTexts::new(&task, &data, CUT, None, &tokenizer, 1024).expect(name);
        let Texts::Prompts(prompts) = &texts.texts else { panic!("{name}: prompts") };
        let questions = task.questions(&data.rows).expect("columns");
        for (prompt, question) in prompts.iter().zip(&questions).take(2) {
            let whole = tokenizer.encode(&question.prompts[0]).expect("words");
            assert!(prompt.len() <= room && *prompt == whole, "{name}: nothing is cut");
        }
        assert!(prompts[0].len() < room / 2, "{name}");
        assert!(prompts[1].len() > room / 2, "{name}");
        assert_eq!((prompts[2].len(), texts.num_truncated), (room, 1), "{name}");
        let report = run_task(&asked, &texts, None, &mut |_, _| {}).expect(name);
        assert!(report.rows.iter().all(|row| row.score.is_some()), "{name}");
        assert!((0.0..=1.0).contains(&report.scores[0].value), "{name}");
    }
}

#[test]
fn a_context_and_its_ending_are_split_as_by_lm_evaluation_harness() {
    let text = "the cat sat on the mat and the cat ran to the cat on the mat ".repeat(40);
    let tokenizer = Tokenizer::train_on(std::iter::once(text.as_str()), 270).expect("enough text");
    let eos_id = tokenizer.eos_id().expect("its own name");
    let encode =
        |context: &str, ending: &str| Pair::encode(&tokenizer, PLAIN, eos_id, [context, ending]).expect("text");
    let whole = tokenizer.encode("the cat sat").expect("text");
    let before = tokenizer.encode("the cat").expect("text").len();
    let parts = (&whole[..], whole.len() - before);
    assert_eq!(encode("the cat", " sat").expect("an ending").parts(), parts);
    assert_eq!(encode("the cat ", "sat").expect("an ending").parts(), parts);
    let first = encode("", "the cat sat").expect("an ending");
    let (tokens, num_scored) = first.parts();
    assert_eq!((tokens[0], &tokens[1..], num_scored), (eos_id, &whole[..], whole.len()));
    assert_eq!(encode("the cat", ""), None);
    // Llama's template puts <s> first: before a context, even one of white space, and once before a lone ending.
    let llama = llama_tokenizer();
    let encode = |context: &str, ending: &str| Pair::encode(&llama, PLAIN, 1, [context, ending]).expect("text");
    let ids = |text: &str| [&[1], &llama.encode(text).expect("text")[..]].concat();
    let (whole, before) = (ids("the cat sat"), ids("the cat").len());
    let pair = encode("the cat ", "sat").expect("an ending");
    assert_eq!(pair.parts(), (&whole[..], whole.len() - before));
    for context in ["", " "] {
        let whole = ids(&format!("{context}sat"));
        let pair = encode(context, "sat").expect("an ending");
        assert_eq!(pair.parts(), (&whole[..], whole.len() - 1));
    }
}

/// Kinds of attention whose KV caches differ: dense, a window and DMA.
fn kinds() -> [Attention; 3] {
    let dma = DmaShape { a_init: 0.5, ..DmaShape::published(5) };
    [Attention::Mha, Attention::swa(6), Attention::Dma(dma)]
}

/// An ending gets the same score alone, after a prompt that all endings share in a pass, and after a cached prompt.
#[test]
fn endings_of_a_shared_prompt_get_the_likelihoods_that_they_get_alone() {
    let tokenizer = tokenizer();
    let device = Default::default();
    let pair = |context: &str, ending: String| {
        let pair = Pair::encode(&tokenizer, PLAIN, 30, [context, &format!(" {ending}")]);
        pair.expect("known words").expect("something to score")
    };
    // 30 questions with 4 endings each. Endings have one token or several, or are equal; or the prompts differ after a
    // common beginning.
    let questions: Vec<Vec<Pair>> = (0..30)
        .map(|n| {
            let one = |k: usize| match n % 3 {
                0 => pair(&mixed(n, 1 + n % 11), mixed(n + k, 1)),
                1 => pair(&mixed(n, 1 + n % 11), mixed(n + k / 2, 1 + k % 3)),
                _ => pair(&format!("{} t{k} t7", mixed(n, 1 + n % 11)), mixed(n, 3)),
            };
            (0..4).map(one).collect()
        })
        .collect();
    for attention in kinds() {
        let model = tiny_model(attention, 64);
        let asked = task_model(&model, &tokenizer, &device);
        let ask = |questions: &[Vec<Pair>]| likelihoods(&asked, questions, true, None, &mut |_| {}).expect("finite");
        let flat = questions.iter().flatten();
        let alone: Vec<Vec<Pair>> = flat.map(|pair| vec![pair.clone()]).collect();
        let (together, alone) = (ask(&questions), ask(&alone));
        let mut cached = Vec::new();
        for pairs in &questions {
            let keep = |n: usize, ending: sieve_infer::Ending| {
                cached.push(Likelihood {
                    log_likelihood: ending.log_likelihood,
                    num_tokens: pairs[n].parts().1,
                    is_greedy: Some(ending.is_greedy),
                });
            };
            score_after_contexts(&asked, pairs, None, keep).expect("finite");
        }
        assert_eq!((together.len(), cached.len()), (120, 120));
        for found in [&together, &cached] {
            for (found, alone) in found.iter().zip(&alone) {
                let error = (found.log_likelihood - alone.log_likelihood).abs();
                assert!(error < 1e-4, "{attention:?}: {found:?} {alone:?}");
                assert_eq!(found.num_tokens, alone.num_tokens);
                assert_eq!(found.is_greedy, alone.is_greedy);
            }
        }
    }
}

/// The prompts have several lengths and are more than one batch holds.
#[test]
fn answers_of_many_prompts_are_those_of_each_alone() {
    let tokenizer = tokenizer();
    let device = Default::default();
    let text = "measure = \"generation\"\nprompt = \"{q}\"\nanswers = \"a\"\nmax_new_tokens = 9\nstop = [\"t1\", \
        \"t2\"]";
    let task = Task::parse("mine.toml", text).expect("a task");
    let prompts: Vec<Vec<u32>> =
        (0..70usize).map(|n| (0..n % 13).map(|k| ((n * 5 + k * k) % 30) as u32).collect()).collect();
    // Every end token ends a text; chat models have several.
    let ends = [vec![30], vec![30, 3, 8, 11, 20, 27]];
    for (attention, ends) in kinds().into_iter().flat_map(|kind| ends.each_ref().map(|ends| (kind, ends))) {
        let model = tiny_model(attention, 64);
        let asked = TaskModel { ends, ..task_model(&model, &tokenizer, &device) };
        let mut heard = Vec::new();
        let found = answers(&asked, &prompts, &task.matching, None, &mut |n| heard.push(n));
        let found = found.expect("answers");
        assert_eq!(heard, (1..=70).collect::<Vec<_>>());
        let (mut num_stopped, mut num_ended) = (0, 0);
        for (prompt, found) in prompts.iter().zip(&found) {
            let config = GenerateConfig { max_new_tokens: 9, sampling: Sampling::GREEDY, eos_id: 30, num_tokens: 31 };
            let generator = Generator::new(&model, prompt, config, &device).expect("room").ending_at(ends);
            let tokens: Vec<u32> = generator.collect::<Result<_, _>>().expect("finite");
            let text = tokenizer.decode_behind(prompt, &tokens).expect("known");
            let end = ["t1", "t2"].iter().filter_map(|stop| text.find(stop)).min();
            num_stopped += usize::from(end.is_some());
            num_ended += usize::from(end.is_none() && tokens.len() < 9);
            assert_eq!(found, &text[..end.unwrap_or(text.len())], "{attention:?} {prompt:?}");
        }
        match ends.len() {
            1 => assert!(num_stopped > 5 && num_stopped < 65, "{num_stopped}"),
            _ => assert!(num_ended > 5, "{num_ended}"),
        }
    }
}

/// The texts of `tests/golden/lm_eval_chats.json` are lm-evaluation-harness's own; tests/python/lm_eval_tasks.py wrote
/// them.
#[test]
fn chats_are_the_texts_of_lm_evaluation_harness() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../tests/golden/lm_eval_chats.json")).expect("JSON");
    let chatml = |turns: &[Turn<'_>]| {
        let turns = turns.iter().map(|(role, text)| format!("<|im_start|>{role}\n{text}<|im_end|>\n"));
        Ok(turns.collect::<String>() + "<|im_start|>assistant\n")
    };
    let no_system = |turns: &[Turn<'_>]| match turns[0].0 {
        "system" => Err("no system role".to_owned()),
        _ => chatml(turns),
    };
    let table = |value: &serde_json::Value| -> Vec<TableRow> { serde_json::from_value(value.clone()).expect("rows") };
    let cases = golden["cases"].as_array().expect("a list");
    assert_eq!(cases.len(), 9 * 2 * 2 * 2);
    for case in cases {
        let name = case["task"].as_str().expect("a name");
        let (task, tables) = (Task::ready(name).expect("ready"), &golden["tables"][name]);
        let data = TaskRows { rows: table(&tables["rows"]), examples: Some(table(&tables["examples"])) };
        let has_system = case["template"] == "chatml";
        let render: &dyn Fn(&[Turn<'_>]) -> Result<String, String> = if has_system { &chatml } else { &no_system };
        let chat = TaskChat::new(case["system"].as_str(), render);
        let fewshot = case["fewshot"].as_u64().expect("a number") as usize;
        let mut wanted = case["requests"].as_array().expect("a list").iter();
        let questions = task.questions(&data.rows).expect("questions");
        for (question, row) in questions.iter().zip(&data.rows) {
            let shots = shots(&task, &data, fewshot, row).expect("examples");
            for (context, continuation) in task.pairs(question, &shots, Some(&chat)).expect("a chat") {
                let wanted = wanted.next().expect("a request");
                assert_eq!(wanted[0], context.as_str(), "{case}");
                assert!(wanted[1].is_null() || wanted[1] == continuation.as_str(), "{continuation:?}: {wanted}");
            }
        }
        assert!(wanted.next().is_none(), "{name}");
        let describes = questions.iter().any(|question| !question.description.is_empty());
        assert_eq!(chat.lacks_system(), !has_system && (describes || !case["system"].is_null()), "{name}");
    }
}

/// A chat template may write the BOS token itself; the tokenizer then adds no second one.
#[test]
fn a_chat_begins_with_one_bos_token() {
    let llama = llama_tokenizer();
    let plain = llama.encode_chat("the").expect("text");
    assert_eq!((plain[0], plain.iter().filter(|&&id| id == 1).count()), (1, 1));
    assert_eq!(llama.encode_chat("<s>the").expect("text").iter().filter(|&&id| id == 1).count(), 1);
    let pair = Pair::encode(&llama, Tokenizer::encode_chat, 1, ["<s>the ", "a"]).expect("text").expect("tokens");
    assert_eq!(pair.parts().0.iter().filter(|&&id| id == 1).count(), 1);
}
