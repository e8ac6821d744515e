//! Random words, numbers, UUIDs and orders for long texts.
use crate::seeded::seeded;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::Rng;

/// Whether texts are for testing or for training. The two share neither words nor seeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Samples for testing: words at even places of the lists.
    Test,
    /// Samples for training: words at odd places of the lists.
    Train,
}

const ADJECTIVES: &str = "amber ancient ashen autumn azure bitter blank bleak blunt bold brave brief bright brisk \
    broad broken bronze calm careful clean clear clever cold cool copper coral crisp curious damp daring dark dawn \
    deep distant dusty dwarf eager early earnest elder empty faded faint fair fancy fast feral fierce final flat \
    floral fluffy fond formal fresh frosty gentle giant glad golden grand grave green grim happy hardy harsh hasty \
    heavy hidden hollow humble icy idle inner iron ivory jolly keen kind large late lazy light little lively local \
    lone long loud lucky lunar mellow mild misty modest muddy narrow neat new noble northern odd old olive pale \
    patient plain polite proud purple quick quiet rapid rare red restless rough round royal rustic sandy scarlet \
    secret shallow sharp shiny short shy silent silver simple sleepy slim slow small smooth snowy soft solar solid \
    sour southern stable steady steep stormy strange strict strong sturdy sudden sunny sweet swift tall tame tender \
    thin tidy tiny tired tough twin upper urban vague valid vast velvet violet vivid warm weary western wet white wide \
    wild wise witty wooden worthy yellow young";

const NOUNS: &str = "acorn actor album anchor angle ankle anvil apple apron arch arrow artist atlas attic badge bag \
    baker ball banjo bank barn barrel basin basket bath beach beacon bean bear beard beaver bed bee bell belt bench \
    berry bird blade blanket boat bolt bone book boot bottle bowl box branch bread breeze brick bridge broom brush \
    bucket bus butter button cabin cable cactus cake camel camera camp candle canoe canvas canyon cap captain car card \
    carpet carrot cart castle cat cedar cello chain chair chalk cheese cherry chess chest chimney church circle circus \
    clay clerk cliff clock cloud clover coach coast coat coin collar comet compass cork corn cotton couch cow crab \
    cradle crane crate creek cricket crow crown cup curtain dancer deer desert desk diary dice dish doctor dog doll \
    dolphin door dove dragon drawer dress drum duck eagle easel echo elbow elm engine falcon farm feather fence fern \
    field finch fire fish flag flame flute fog folder forest fork fox frame frog fruit garden garlic gate ghost \
    glacier glass globe glove goat grape grass guitar hammer harbor harp hat hawk hazel heron hill hinge honey hook \
    horn horse hotel house island ivy jacket jar jewel judge jug jungle kettle key king kite kitchen kitten knee knife \
    knot ladder lake lamb lamp lantern lawn leaf lemon letter library lily lion lizard lock lodge log magnet maple \
    marble market mask meadow medal melon mill mirror mitten moat moon moss motor mountain mouse museum needle nest \
    net night notebook nurse oak oar ocean office onion orange orchard otter oven owl oyster page paint palace palm \
    panda paper parrot path pea peach pearl pebble pen pencil pepper piano pilot pine pipe planet plate plum pocket \
    poem pond pony poppy porch potato prince pump puppet queen quilt rabbit radio raft rain ranch raven ribbon ring \
    river road robin rocket roof room rope rose ruby sail salmon salt sand saddle school seal seed shadow sheep shelf \
    shell ship shirt shoe shore singer sister skate sky sled snail snow sofa soldier song spider spoon spring squid \
    stable star station stone storm stove straw stream street swan table tailor teacher temple tent thread throne \
    thunder tiger toast tower town train tree trumpet tulip tunnel turtle valley vase village violin wagon wall walnut \
    watch wheel whistle willow window wing winter wizard wolf woods wool zebra";

/// A random generator, seeded by split, seed, task, length and sample number.
#[derive(Debug)]
pub(super) struct Random {
    random: ChaCha8Rng,
    split: Split,
}

impl Random {
    /// The stream of one text, which depends on all of these and on nothing else.
    pub(super) fn new(split: Split, seed: u64, task: &str, length: usize, number: u64) -> Self {
        // FNV-1a hash of the task and the split.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let split_byte = [split as u8];
        for byte in task.bytes().chain(split_byte) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Self { random: seeded([seed, hash, length as u64, number]), split }
    }

    /// A uniform number below `count`, which is above 0. The modulo's bias is negligible: `count / 2^64`.
    pub(super) fn below(&mut self, count: usize) -> usize {
        (self.random.next_u64() % count as u64) as usize
    }

    /// `count` different numbers below `limit`, in random order. Panics if `count > limit`.
    pub(super) fn sample(&mut self, limit: usize, count: usize) -> Vec<usize> {
        assert!(count <= limit, "{count} different numbers below {limit}");
        let mut all: Vec<usize> = (0..limit).collect();
        for n in 0..count {
            let other = n + self.below(limit - n);
            all.swap(n, other);
        }
        all.truncate(count);
        all
    }

    pub(super) fn shuffle<T>(&mut self, values: &mut [T]) {
        for n in (1..values.len()).rev() {
            let other = self.below(n + 1);
            values.swap(n, other);
        }
    }

    /// A number of `digits` decimal digits, without a leading 0.
    pub(super) fn number(&mut self, digits: u32) -> String {
        let first = 10usize.pow(digits - 1);
        (first + self.below(9 * first)).to_string()
    }

    /// A random UUID of version 4.
    pub(super) fn uuid(&mut self) -> String {
        let (a, b) = (self.random.next_u64(), self.random.next_u64());
        // Sets the bits of version 4, and those of the variant (RFC 9562).
        let (a, b) = ((a & !0xf000) | 0x4000, (b & !(3 << 62)) | (2 << 62));
        format!(
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            a >> 32,
            a >> 16 & 0xffff,
            a & 0xffff,
            b >> 48,
            b & 0xffff_ffff_ffff
        )
    }

    /// `count` letters from the alphabet that starts at `first` (`b'a'` or `b'A'`).
    pub(super) fn letters(&mut self, first: u8, count: usize) -> String {
        (0..count).map(|_| char::from(first + self.below(26) as u8)).collect()
    }

    /// An adjective and a noun joined by a hyphen.
    pub(super) fn pair_of_words(&mut self) -> String {
        let [adjectives, nouns] = [self.own(ADJECTIVES), self.own(NOUNS)];
        let adjective = adjectives[self.below(adjectives.len())];
        format!("{adjective}-{}", nouns[self.below(nouns.len())])
    }

    /// `count` different words in random order: nouns, and if these are too few, pairs of nouns written as one word.
    /// May panic for more than [`MAX_WORDS`].
    pub(super) fn words(&mut self, count: usize) -> Vec<String> {
        let nouns = self.own(NOUNS);
        let size = nouns.len();
        // Pair number `a * size + b` is noun a, then noun b.
        let places = self.sample(size * size, count.max(size).min(size * size));
        let mut single: Vec<&str> = nouns.clone();
        self.shuffle(&mut single);
        let two = places.iter().filter(|&&place| place / size != place % size);
        let two = two.map(|&place| format!("{}{}", nouns[place / size], nouns[place % size]));
        let mut words: Vec<String> = single.into_iter().map(str::to_owned).collect();
        words.extend(two);
        let mut seen = std::collections::HashSet::new();
        words.retain(|word| seen.insert(word.clone()));
        assert!(count <= words.len(), "{count} different words");
        words.truncate(count);
        self.shuffle(&mut words);
        words
    }

    /// The words of a list that belong to this split.
    fn own(&self, list: &'static str) -> Vec<&'static str> {
        list.split_whitespace().skip(self.split as usize).step_by(2).collect()
    }
}

/// [`Random::words`] can give this many different words.
pub(super) const MAX_WORDS: usize = 20_000;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn choices_are_even_and_repeat_with_their_seed() {
        let random = |seed, number| Random::new(Split::Test, seed, "vt", 512, number);
        let mut counts = [0; 5];
        let mut one = random(1, 0);
        for _ in 0..10_000 {
            counts[one.below(5)] += 1;
        }
        // 200 is five standard deviations of a count in 10,000 draws.
        assert!(counts.iter().all(|&n: &i32| (n - 2000).abs() < 200), "{counts:?}");
        assert_eq!(random(1, 2).uuid(), random(1, 2).uuid());
        assert_ne!(random(1, 2).uuid(), random(1, 3).uuid());
        assert_ne!(random(1, 2).uuid(), random(2, 2).uuid());
        let train = Random::new(Split::Train, 1, "vt", 512, 2).uuid();
        assert_ne!(random(1, 2).uuid(), train);
        let uuid = random(3, 0).uuid();
        let parts: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
        assert!(uuid[14..].starts_with('4') && "89ab".contains(&uuid[19..20]), "{uuid}");
        let mut order = random(1, 0).sample(9, 9);
        assert_ne!(order, (0..9).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn splits_share_no_word() {
        let words = |split| -> HashSet<String> {
            let mut random = Random::new(split, 0, "cwe", 512, 0);
            let words: Vec<String> = random.words(MAX_WORDS);
            assert_eq!(words.len(), MAX_WORDS);
            let set: HashSet<String> = words.into_iter().collect();
            assert_eq!(set.len(), MAX_WORDS);
            set
        };
        let (test, train) = (words(Split::Test), words(Split::Train));
        let both: Vec<&String> = test.intersection(&train).collect();
        assert!(both.is_empty(), "{both:?}");
        let mut random = Random::new(Split::Test, 0, "cwe", 512, 0);
        assert!(random.words(30).iter().all(|word| NOUNS.contains(word.as_str())));
        assert!(random.pair_of_words().contains('-'));
    }
}
