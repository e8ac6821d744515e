//! On a CPU a token has one log-probability, to the bit, whoever asks: the trainer's pass over whole rows, `eval`,
//! `generate`, and `serve` with any neighbours, for every kind of attention and for f32 and bf16 weights.
use crate::random_model::{
    CONTEXT, ONE_OF_EACH, VOCAB_SIZE, greedy, ids, kinds, random_model, random_model_of, recipe, recipe_with_context,
    tokens, write_checkpoint,
};
use crate::serve::Served;
use crate::tiny_run::TinyRun;
use burn::backend::Autodiff;
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::Flex;
use serde_json::{Value, json};
use sieve_hf::Kept;
use sieve_infer::{BatchGenerator, Continuation, Drawn, GenerateConfig, Generator, OpenTexts, Sampling, score_prompts};
use sieve_nn::{KvCache, LayerContext, Qwen3};
use sieve_ops::{Documents, SieveBackend, token_loss_on_host};
use sieve_testing::Random;

/// Texts that arrive while others are decoded: how many, and the most tokens of each.
const ARRIVALS: [[usize; 2]; 3] = [[1, CONTEXT], [3, 40], [16, 14]];

/// Tokens of a long text: more than a tile of queries or a block of gathered keys has.
const LONG: usize = 330;

/// MSA whose indexer has one key per block, which transformers' parity does not cover.
const QSA: [&str; 3] = [
    "msa_qsa",
    "tie_word_embeddings = true",
    "kind = \"msa\"\nindexer = \"qsa\"\nselect_block_size = 4\nnum_selected_blocks = 3",
];

/// What the pass over the whole text, alone in its row, says about a text.
struct Expected {
    tokens: Vec<u32>,
    /// Logits after each token, `[tokens, VOCAB_SIZE]`.
    logits: Vec<f32>,
}

/// One model with its texts, and what is compared with the pass over whole rows.
struct Case<'a> {
    /// Names the kind and the dtype of the weights.
    name: String,
    model: &'a Qwen3<Flex>,
    texts: Vec<Expected>,
    random: Random,
    /// Room for the longest text, and for tokens that are not the text's.
    room: usize,
    /// Tokens that were compared, over all ways.
    compared: usize,
}

/// The log-probability of each token of a text but the first, by one pass of any backend in which each of `rows` is a
/// row; padding is a document of its own.
fn losses_of_rows<B: SieveBackend>(model: &Qwen3<B>, rows: &[&[u32]], padded: usize) -> Vec<Vec<f64>> {
    let (device, shape) = (Default::default(), [rows.len(), padded]);
    let (mut tokens, mut labels, mut start, mut end) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let (len, rest) = (row.len(), padded - row.len());
        tokens.extend(row.iter().map(|&token| token as i32).chain(vec![0; rest]));
        labels.extend(row[1..].iter().map(|&token| token as i32).chain(vec![-100; rest + 1]));
        start.extend([vec![0; len], vec![len as u32; rest]].concat());
        end.extend([vec![len as u32; len], vec![padded as u32; rest]].concat());
    }
    let documents = Documents::<B>::new(&start, &end, shape, &device);
    let rope = model.rope(padded, &device);
    let ints = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, shape), &device);
    let losses = model.token_losses(ints(tokens), ints(labels), &LayerContext::new(&documents, &rope));
    let losses: Vec<f64> = losses.into_data().iter::<f64>().collect();
    let of_row = |(row, losses): (&&[u32], &[f64])| losses[..row.len() - 1].iter().map(|loss| -loss).collect();
    rows.iter().zip(losses.chunks(padded)).map(of_row).collect()
}

/// A token's log-probability by the logits before it.
fn log_probability(logits: &[f32], token: u32) -> f64 {
    -f64::from(token_loss_on_host(logits, token))
}

impl<'a> Case<'a> {
    /// Texts of random tokens, as many as arrive together, with the logits of each alone in a row.
    fn new(name: String, model: &'a Qwen3<Flex>, [count, longest]: [usize; 2], seed: u64) -> Self {
        let mut random = Random(seed);
        let texts = (0..count).map(|_| {
            let len = if count == 1 { longest } else { random.between(2, longest + 1) };
            let tokens: Vec<u32> = (0..len).map(|_| random.below(VOCAB_SIZE) as u32).collect();
            let logits = sieve_infer::logits(model, &tokens, &Default::default()).expect("tokens of the vocabulary");
            Expected { tokens, logits: logits.into_vec().expect("f32") }
        });
        let texts = texts.collect();
        Self { name, model, texts, random, room: longest + 4, compared: 0 }
    }

    /// Compares the logits after `read` tokens of a text, and by them the next token's log-probability.
    fn check(&mut self, way: &str, text: usize, read: usize, logits: &[f32]) {
        let Expected { tokens, logits: expected } = &self.texts[text];
        let expected = &expected[(read - 1) * VOCAB_SIZE..][..VOCAB_SIZE];
        let token = tokens.get(read).copied().unwrap_or(0);
        let [found, wanted] = [logits, expected].map(|logits| log_probability(logits, token));
        let differ = logits.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        self.compared += 1;
        assert!(
            differ == 0 && found.to_bits() == wanted.to_bits(),
            "{}, {way}: token {read} of text {text} has {found:?} instead of {wanted:?}, {differ} logits differ",
            self.name
        );
    }

    /// Compares log-probabilities of all tokens of a text but the first.
    fn check_losses(&mut self, way: &str, text: usize, found: &[f64]) {
        let Expected { tokens, logits } = &self.texts[text];
        assert_eq!(found.len(), tokens.len() - 1);
        for (at, (&found, logits)) in found.iter().zip(logits.chunks(VOCAB_SIZE)).enumerate() {
            let wanted = log_probability(logits, tokens[at + 1]);
            assert!(
                found.to_bits() == wanted.to_bits(),
                "{}, {way}: token {} of text {text} has {found:?} instead of {wanted:?}",
                self.name,
                at + 1
            );
        }
        self.compared += found.len();
    }

    /// Whole rows: texts in a row of their own, alone and with others; as documents of one row, as `serve` scores them;
    /// and, with `trained`, in a pass with a graph.
    fn whole_rows(&mut self, trained: Option<&Qwen3<Autodiff<Flex>>>) {
        let texts: Vec<Vec<u32>> = self.texts.iter().map(|text| text.tokens.clone()).collect();
        let rows: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let longest = rows.iter().map(|row| row.len()).max().expect("a text");
        for (text, found) in losses_of_rows(self.model, &rows, longest).iter().enumerate() {
            self.check_losses("rows of a batch", text, found);
        }
        if let Some(trained) = trained {
            for (text, found) in losses_of_rows(trained, &rows, longest).iter().enumerate() {
                self.check_losses("the trainer's pass", text, found);
            }
        }
        let mut at = 0;
        while at < rows.len() {
            let count = self.random.between(1, 6).min(rows.len() - at);
            let scores = score_prompts(self.model, &rows[at..at + count], 0, &Default::default()).expect("prompts");
            for (text, scores) in (at..).zip(scores) {
                let found: Vec<f64> = scores.tokens.iter().map(|score| score.log_probability).collect();
                self.check_losses("documents of one row", text, &found);
                self.check("after a document", text, rows[text].len(), scores.next.row(0));
            }
            at += count;
        }
    }

    /// A prompt of random length, then single tokens, while texts arrive and leave at random.
    fn arrivals(&mut self) {
        let count = self.texts.len();
        let texts: Vec<Vec<u32>> = self.texts.iter().map(|text| text.tokens.clone()).collect();
        let mut open = OpenTexts::new(self.model, [count, self.room], None, &Default::default());
        let mut waiting: Vec<usize> = (0..count).collect();
        while !waiting.is_empty() || !open.is_empty() {
            while !waiting.is_empty() && (open.is_empty() || self.random.chance(0.6)) {
                let text = waiting.swap_remove(self.random.below(waiting.len()));
                let prompt = self.random.between(1, texts[text].len() + 1);
                let mut begun = open.before(&texts[text][..prompt]).expect("a prompt");
                let logits = begun.read(&texts[text][..prompt]).expect("a prompt");
                self.check("a prompt", text, prompt, &logits);
                open.add(begun, (text, prompt));
            }
            let token = |&(text, read): &(usize, usize)| texts[text].get(read).copied();
            let next = |(text, read): &mut (usize, usize), logits: &[f32]| {
                *read += 1;
                self.check("a token among others", *text, *read, logits);
            };
            open.step(token, next).expect("tokens");
        }
    }

    /// Pieces of random size behind a cache. A copy of the cache reads something else first, which must not reach the
    /// text, and sometimes the copy goes on with the text.
    fn pieces(&mut self) {
        for text in 0..self.texts.len() {
            let tokens = self.texts[text].tokens.clone();
            let mut reading = Continuation::new(self.model, self.room, &Default::default());
            let mut read = 0;
            while read < tokens.len() {
                let most = self.random.one_of(&[1, 4, CONTEXT, LONG]).min(tokens.len() - read);
                let piece = self.random.between(1, most + 1);
                let logits = reading.read(&tokens[read..read + piece]).expect("tokens");
                read += piece;
                self.check("a piece", text, read, &logits);
                let mut copy = reading.clone();
                if self.random.chance(0.3) && read < tokens.len() {
                    reading.read(&[7, 7, 11][..self.random.between(1, 4)]).expect("tokens");
                    let logits = copy.read(&tokens[read..=read]).expect("a token");
                    read += 1;
                    self.check("a copy of a cache", text, read, &logits);
                    reading = copy;
                }
            }
        }
    }

    /// A prompt whose cache is repeated for several texts of one batch, as for one prompt with several completions.
    fn repeated(&mut self) {
        let (rows, text) = (self.random.between(2, 5), 0);
        let tokens = self.texts[text].tokens.clone();
        let (prompt, rope) = (tokens.len().div_ceil(2), self.model.rope(self.room, &Default::default()));
        let mut cache = KvCache::new(self.model.layers.len());
        self.model.next_logits(ids(&tokens[..prompt]), &mut cache, &rope);
        cache.repeat(rows);
        for (read, &token) in tokens.iter().enumerate().skip(prompt) {
            let next = vec![token as i32; rows];
            let next = Tensor::from_data(TensorData::new(next, [rows, 1]), &Default::default());
            let logits: Vec<f32> = self.model.next_logits(next, &mut cache, &rope).into_data().into_vec().expect("f32");
            for logits in logits.chunks(VOCAB_SIZE) {
                self.check("a copy of a prompt", text, read + 1, logits);
            }
        }
    }
}

/// Compares all ways for one kind; returns the number of tokens of its texts, and how many were compared.
fn check_kind([kind, model_lines, attention]: [&str; 3], kept: Kept, seed: u64) -> [usize; 2] {
    let is_f32 = matches!(kept, Kept::All(_));
    let mut counts = [0, 0];
    let long = [1, LONG];
    for arrivals in ARRIVALS.into_iter().chain(ONE_OF_EACH.contains(&kind).then_some(long)) {
        let recipe = if arrivals == long {
            recipe_with_context(model_lines, attention, LONG + 4)
        } else {
            recipe(model_lines, attention)
        };
        let model = random_model_of::<Flex>(&recipe, seed, kept);
        // The trainer's weights are f32.
        let trained = is_f32.then(|| random_model_of::<Autodiff<Flex>>(&recipe, seed, kept));
        let dtype = if is_f32 { "f32" } else { "bf16" };
        let name = format!("{kind}, {dtype} weights, {} texts of at most {} tokens", arrivals[0], arrivals[1]);
        let mut case = Case::new(name, &model, arrivals, seed * 31 + arrivals[0] as u64);
        case.whole_rows(trained.as_ref());
        case.arrivals();
        case.pieces();
        case.repeated();
        counts[0] += case.texts.iter().map(|text| text.tokens.len()).sum::<usize>();
        counts[1] += case.compared;
    }
    counts
}

#[test]
fn a_token_has_one_log_probability_whoever_asks() {
    let of_kind = |kind| [(kind, Kept::All(DType::F32)), (kind, Kept::Bf16Weights)];
    let cases: Vec<([&str; 3], Kept)> = kinds().into_iter().chain([QSA]).flat_map(of_kind).collect();
    // Two threads, because much of a tiny model's time is spent outside of kernels.
    let run = |first: usize| -> Vec<[usize; 2]> {
        let some = (1..).zip(&cases).skip(first).step_by(2);
        some.map(|(seed, (kind, kept))| check_kind(*kind, *kept, seed)).collect()
    };
    let counts = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        let own = run(0);
        let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        [own, other].concat()
    });
    let [tokens, compared] = [0, 1].map(|at| counts.iter().map(|count| count[at]).sum::<usize>());
    assert!(tokens >= 10_000 && compared > 3 * tokens, "{tokens} tokens, compared {compared} times");
}

#[test]
fn generated_tokens_have_the_log_probabilities_of_whole_rows_also_the_token_that_ends_a_text() {
    for [kind, model_lines, attention] in kinds() {
        let model = random_model(&recipe(model_lines, attention), 5);
        let device = Default::default();
        let config = |seed, eos_id| GenerateConfig {
            sampling: Sampling { temperature: 0.9, top_p: 0.95, top_k: None, seed },
            eos_id,
            ..greedy(20)
        };
        let check = |way: &str, prompt: &[u32], drawn: &[Drawn]| {
            let new = drawn.iter().map(|drawn| drawn.token.expect("finite"));
            let row: Vec<u32> = prompt.iter().copied().chain(new).collect();
            let all = losses_of_rows(&model, &[&row], row.len()).remove(0);
            let expected: Vec<u64> = all[prompt.len() - 1..].iter().map(|score| score.to_bits()).collect();
            let found: Vec<u64> = drawn.iter().map(|drawn| drawn.log_probability.to_bits()).collect();
            assert_eq!(found, expected, "{kind}, {way}");
        };
        let alone = |prompt: &[u32], config| {
            let mut generator = Generator::new(&model, prompt, config, &device).expect("it fits").with_scores(true);
            let mut drawn = Vec::new();
            while let Some(token) = generator.next() {
                assert_eq!(generator.last_drawn().expect("a token").token, Some(token.expect("finite")));
                drawn.extend(generator.last_drawn());
            }
            if drawn.len() < 20 {
                drawn.extend(generator.last_drawn());
            }
            drawn
        };
        let prompt = tokens(11, 4);
        let free = alone(&prompt, config(7, VOCAB_SIZE as u32));
        assert_eq!(free.len(), 20, "{kind}");
        check("alone", &prompt, &free);
        // A token that comes on the way ends this text.
        let eos = free[9].token.expect("finite");
        let ended = alone(&prompt, config(7, eos));
        assert!(ended.len() <= 10 && ended.last().is_some_and(|last| last.token == Some(eos)), "{kind}");
        check("ended", &prompt, &ended);

        let prompts = [tokens(29, 3), tokens(1, 8), prompt];
        let together = [
            BatchGenerator::new(&model, &prompts[0], config(6, eos), 3, &device).expect("it fits"),
            BatchGenerator::of_prompts(&model, &prompts, config(6, eos), &device).expect("they fit"),
        ];
        for (way, generator) in ["samples", "prompts"].into_iter().zip(together) {
            let mut generator = generator.with_scores(true);
            let mut texts: [(Vec<Drawn>, bool); 3] = Default::default();
            while let Some(step) = generator.next() {
                for (at, token) in step.expect("finite").into_iter().enumerate() {
                    let (drawn, has_ended) = &mut texts[at];
                    if !*has_ended {
                        drawn.extend(generator.last_drawn(at));
                    }
                    *has_ended |= token.is_none();
                }
            }
            for (at, (drawn, _)) in texts.iter().enumerate() {
                let prompt = if way == "samples" { &prompts[0] } else { &prompts[at] };
                check(way, prompt, drawn);
            }
        }
    }
}

#[test]
fn served_tokens_have_the_log_probabilities_of_their_echo_among_any_others() {
    let tiny = TinyRun::new("kind = \"mha\"");
    // Half of them: a server takes seconds to start and to stop.
    for (at, kind) in ONE_OF_EACH.into_iter().step_by(2).enumerate() {
        let [_, model_lines, attention] = kinds().into_iter().find(|[name, ..]| *name == kind).expect("a kind");
        let recipe = recipe(model_lines, attention);
        write_checkpoint(&tiny.path(kind), &recipe, &random_model(&recipe, 5));
        let (texts, dtype) = ([1, 3, 16][at % 3], ["f32", "bf16"][at % 2]);
        let served = Served::new(&tiny, kind, &format!("--max-texts {texts} --dtype {dtype}"));
        let ask = |prompt: &Value, more: Value| {
            let mut body = json!({"prompt": prompt, "logprobs": 0, "return_token_ids": true});
            more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
            served.completion(&body)
        };
        let list = |of: &Value| of.as_array().expect("a list").clone();
        std::thread::scope(|scope| {
            for client in 0..6 {
                let ask = &ask;
                scope.spawn(move || {
                    let prompt: Vec<Value> = (0..3 + 4 * client).map(|n| json!((n * n * 5 + client) % 90)).collect();
                    let sampled = json!({"max_tokens": 9 + 2 * client, "temperature": 0.9, "seed": client});
                    let sampled = ask(&json!(prompt), sampled);
                    let new = list(&sampled["token_ids"]);
                    assert_eq!(list(&sampled["prompt_token_ids"]), prompt, "{kind}, client {client}");
                    let echoed =
                        ask(&json!([prompt.clone(), new.clone()].concat()), json!({"max_tokens": 0, "echo": true}));
                    assert!(!new.is_empty());
                    assert_eq!(list(&echoed["token_ids"])[prompt.len()..], new, "{kind}, client {client}");
                    let scores = |choice: &Value| list(&choice["logprobs"]["token_logprobs"]);
                    assert_eq!(scores(&echoed)[prompt.len()..], scores(&sampled), "{kind}, client {client}");
                });
            }
        });
        served.stop();
    }
}
