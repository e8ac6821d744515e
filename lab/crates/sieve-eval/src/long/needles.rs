//! RULER's eight needle tasks: sentences with a magic number, word or UUID hidden in a text.
use super::random::Random;
use super::sample::{LongSample, Match, depth, wrong};
use super::text::{LongText, NOISE};
use crate::seeded::different;

/// Needles in essays are placed at depths drawn from this many even steps from 0 to 100 %.
const NUM_DEPTHS: usize = 40;

/// What the needles are hidden in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hay {
    Noise,
    Essay,
    Needles,
}

/// What a needle's key or its value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thing {
    Words,
    Numbers,
    Uuids,
}

impl Thing {
    fn draw(self, random: &mut Random) -> String {
        match self {
            Self::Words => random.pair_of_words(),
            Self::Numbers => random.number(7),
            Self::Uuids => random.uuid(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Words => "words",
            Self::Numbers => "numbers",
            Self::Uuids => "uuids",
        }
    }
}

/// Settings of one of the eight tasks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needles {
    hay: Hay,
    keys: Thing,
    values: Thing,
    num_keys: usize,
    num_values: usize,
    num_queries: usize,
}

impl Needles {
    /// The settings of RULER's task of this name. Panics for another name.
    pub(super) fn of(name: &str) -> Self {
        use Thing::{Numbers, Uuids, Words};
        let (hay, [keys, values], [num_keys, num_values, num_queries]) = match name {
            "niah_single_1" => (Hay::Noise, [Words, Numbers], [1, 1, 1]),
            "niah_single_2" => (Hay::Essay, [Words, Numbers], [1, 1, 1]),
            "niah_single_3" => (Hay::Essay, [Words, Uuids], [1, 1, 1]),
            "niah_multikey_1" => (Hay::Essay, [Words, Numbers], [4, 1, 1]),
            "niah_multikey_2" => (Hay::Needles, [Words, Numbers], [1, 1, 1]),
            "niah_multikey_3" => (Hay::Needles, [Uuids, Uuids], [1, 1, 1]),
            "niah_multivalue" => (Hay::Essay, [Words, Numbers], [1, 4, 1]),
            "niah_multiquery" => (Hay::Essay, [Words, Numbers], [4, 1, 4]),
            other => panic!("{other} is not a needle task"),
        };
        Self { hay, keys, values, num_keys, num_values, num_queries }
    }

    pub(super) fn haystack(self, text: &LongText) -> &str {
        match self.hay {
            Hay::Noise => "noise",
            Hay::Essay => &text.name,
            Hay::Needles => "needles",
        }
    }

    /// Fewest parts of the text: as many as needles, since each is inserted before another part.
    pub(super) fn fewest(self) -> usize {
        self.num_keys * self.num_values
    }

    /// Draws a sample: a needle for each value of each key, inserted between `parts` sentences or lines of the haystack
    /// at random places, and a question about some of the keys, whose values are the answer.
    pub(super) fn sample(self, text: &LongText, random: &mut Random, parts: usize) -> LongSample {
        let keys = different(self.num_keys, || self.keys.draw(random));
        let mut values: Vec<Vec<String>> = Vec::new();
        let mut needles = Vec::new();
        for key in &keys {
            let of_key: Vec<String> = (0..self.num_values).map(|_| self.values.draw(random)).collect();
            needles.extend(of_key.iter().map(|value| (self.needle(key, value), key.clone())));
            values.push(of_key);
        }
        random.shuffle(&mut needles);
        let asked = random.sample(self.num_keys, self.num_queries);
        let (mut sentences, joint) = self.sentences(text, random, parts, &keys);
        // The n-th needle is placed before part `places[n]`.
        let places = match self.hay {
            Hay::Essay => {
                let depths = random.sample(NUM_DEPTHS, needles.len()).into_iter();
                let place = |depth| parts * rounded_percent(depth) / 100;
                sorted(depths.map(place).collect())
            }
            Hay::Noise | Hay::Needles => sorted(random.sample(parts, needles.len())),
        };
        // An answer of several needles has no single depth.
        let first_asked = &keys[asked[0]];
        let at = needles.iter().position(|(_, key)| key == first_asked);
        let depth = match self.num_queries * self.num_values {
            1 => depth(places[at.expect("the asked key has a needle")], parts),
            _ => None,
        };
        for (place, (needle, _)) in places.into_iter().zip(needles).rev() {
            sentences.insert(place, needle);
        }
        let context = sentences.join(joint);
        let references: Vec<String> = asked.iter().flat_map(|&n| values[n].clone()).collect();
        let queries: Vec<&str> = asked.iter().map(|&n| keys[n].as_str()).collect();
        let wrong = wrong(&context, || self.values.draw(random));
        LongSample { prompt: self.prompt(&context, &queries), references, matching: Match::All, depth, wrong }
    }

    fn needle(self, key: &str, value: &str) -> String {
        format!("One of the special magic {} for {key} is: {value}.", self.values.name())
    }

    /// The sentences that the needles are inserted between, and the separator that joins them.
    fn sentences(
        self,
        text: &LongText,
        random: &mut Random,
        parts: usize,
        keys: &[String],
    ) -> (Vec<String>, &'static str) {
        match self.hay {
            Hay::Noise => (vec![NOISE.to_owned(); parts], "\n"),
            Hay::Essay => (text.first(parts).into_iter().map(str::to_owned).collect(), text.joint),
            Hay::Needles => {
                let mut other = || loop {
                    let key = self.keys.draw(random);
                    // Another needle with an asked key would be a second answer.
                    if !keys.contains(&key) {
                        return self.needle(&key, &self.values.draw(random));
                    }
                };
                ((0..parts).map(|_| other()).collect(), "\n")
            }
        }
    }

    /// The text with its question, in RULER's words for one value or for several.
    fn prompt(self, context: &str, queries: &[&str]) -> String {
        let query = match queries {
            [one] => (*one).to_owned(),
            [first @ .., last] => format!("{}, and {last}", first.join(", ")),
            [] => String::new(),
        };
        let things = self.values.name();
        match self.num_queries * self.num_values {
            1 => {
                let thing = things.trim_end_matches('s');
                format!(
                    "A special magic {thing} is hidden within the following text. Make sure to memorize it. I will \
                     quiz you about the {thing} afterwards.\n{context}\nWhat is the special magic {thing} for {query} \
                     mentioned in the provided text? The special magic {thing} for {query} mentioned in the provided \
                     text is"
                )
            }
            _ => format!(
                "Some special magic {things} are hidden within the following text. Make sure to memorize it. I will \
                 quiz you about the {things} afterwards.\n{context}\nWhat are all the special magic {things} for \
                 {query} mentioned in the provided text? The special magic {things} for {query} mentioned in the \
                 provided text are"
            ),
        }
    }
}

/// The n-th of 40 even steps from 0 to 100, rounded.
fn rounded_percent(n: usize) -> usize {
    (n as f64 * 100.0 / (NUM_DEPTHS - 1) as f64).round_ties_even() as usize
}

fn sorted(mut places: Vec<usize>) -> Vec<usize> {
    places.sort_unstable();
    places
}
