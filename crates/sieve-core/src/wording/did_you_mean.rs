//! Suggests a known name in place of a misspelt one.

/// `, did you mean NAME?` with the name most similar to `name`; empty if none is similar.
///
/// Two names are similar if their edit distance is at most a third of the longer name's length; swapped neighbours are
/// one edit. They are also similar if the shorter is part of the longer and at least two fifths as long, like `window`
/// and `sliding_window`.
pub fn did_you_mean(name: &str, known: &[&str]) -> String {
    let name = name.to_lowercase();
    let similarity = |candidate: &&str| {
        let candidate = candidate.to_lowercase();
        let [short, long] = if name.len() < candidate.len() { [&name, &candidate] } else { [&candidate, &name] };
        let num_changes = strsim::osa_distance(&name, &candidate);
        let is_part = 5 * short.len() >= 2 * long.len() && long.contains(short.as_str());
        let is_close = 3 * num_changes <= long.chars().count() || is_part;
        is_close.then(|| strsim::jaro_winkler(&name, &candidate))
    };
    let similar = known.iter().filter_map(|candidate| Some((similarity(candidate)?, candidate)));
    let nearest = similar.max_by(|left, right| left.0.total_cmp(&right.0));
    nearest.map_or(String::new(), |(_, nearest)| format!(", did you mean {nearest}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_similar_names_are_suggested() {
        for (name, known, nearest) in [
            ("hiden_size", &["hidden_size", "head_dim"][..], Some("hidden_size")),
            ("adam", &["AdamW", "Muon"], Some("AdamW")),
            ("quset", &["dense", "quest"], Some("quest")),
            ("window", &["sliding_window", "windows"], Some("windows")),
            ("window", &["hidden_size", "sliding_window"], Some("sliding_window")),
            ("foo", &["fwe", "momo"], None),
            ("nosuch", &["longbench2"], None),
            ("nonsense", &["dense"], None),
            ("", &["dense"], None),
        ] {
            let expected = nearest.map_or(String::new(), |nearest| format!(", did you mean {nearest}?"));
            assert_eq!(did_you_mean(name, known), expected, "{name}");
        }
    }
}
