//! The main setting of each method, which trades density for recall, and its values along a curve.

use super::parse::text_of_items;
use super::{Method, Selector};
use crate::error::SelectError;
use crate::prefill::Knob;
use crate::prefill::momo::TopK;

impl Selector {
    /// The key that trades density for recall; `None` for methods without one and for decode methods.
    pub fn knob(&self) -> Option<&'static str> {
        self.knob_values().map(|knob| knob.0)
    }

    fn knob_values(&self) -> Option<Knob> {
        self.method.of_prefill()?.knob()
    }

    /// The same selector with its main setting at each value of a curve and the others unchanged. A setting bounded by
    /// it (momo's `k_exact`, at most k) is lowered with it; a value that another setting forbids is left out. Empty for
    /// a method without such a setting.
    pub fn sweep(&self) -> Vec<Self> {
        let Some((key, values)) = self.knob_values() else {
            return Vec::new();
        };
        let moved = values.iter().map(|value| self.moved(key, value));
        moved.filter_map(Result::ok).collect()
    }

    /// The selector with its main setting at `value`, and momo's `k_exact` at most that.
    fn moved(&self, key: &str, value: &str) -> Result<Self, SelectError> {
        let mut selector = self.clone();
        if let Method::Momo(config) = &mut selector.method
            && config.topk == TopK::Hybrid
            && let Ok(k) = value.parse()
        {
            config.k_exact = config.k_exact.min(k);
        }
        selector.with(key, value)
    }

    /// The shortest text that [`parse`](Self::parse) reads as this selector: without settings at their defaults.
    pub fn label(&self) -> String {
        self.label_without("")
    }

    /// The [`label`](Self::label) without one key.
    pub fn label_without(&self, key: &str) -> String {
        let name = match &self.method {
            // The defaults of the base's settings depend on the base.
            Method::Delta(config, _) => format!("delta:base={}", config.base),
            _ => self.name().to_owned(),
        };
        let usual = |text: &str| Self::parse(text).map_or(Vec::new(), |one| one.all_items());
        let mut defaults = usual(&name);
        // `base` itself is left out only if it is delta's default base.
        if matches!(self.method, Method::Delta(..)) {
            let base = usual("delta").into_iter().find(|item| item.0 == "base");
            defaults.retain(|item| item.0 != "base");
            defaults.extend(base);
        }
        let own = self.all_items().into_iter();
        text_of_items(self.name(), own.filter(|item| item.0 != key && !defaults.contains(item)))
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::parsed;
    use crate::{ENTRIES, Method, Phase};

    #[test]
    fn swept_values_stay_inside_each_methods_rules() {
        for entry in ENTRIES {
            let selector = parsed(entry.name);
            let sweep = selector.sweep();
            let Some(key) = selector.knob() else {
                assert!(sweep.is_empty());
                continue;
            };
            assert_ne!(entry.phase, Phase::Decode);
            let values = selector.knob_values().map_or(0, |knob| knob.1.len());
            assert!(sweep.len() == values && values > 3, "{}", entry.name);
            for (at, moved) in sweep.iter().enumerate() {
                moved.check().unwrap_or_else(|error| panic!("{error}"));
                assert!(!sweep[..at].contains(moved), "{moved} twice");
                // Only the knob changes, and momo's k_exact, which may not exceed it.
                let back = moved.label_without(key).replace(":k_exact=2", "");
                let back = back.replace(":k_exact=4", "");
                assert_eq!(back, entry.name, "{moved}");
            }
        }
        for moved in parsed("momo").sweep() {
            let Method::Momo(config) = &moved.method else {
                panic!("another method");
            };
            assert_eq!(config.k_exact, config.k.min(8));
        }
    }

    #[test]
    fn the_knob_is_the_setting_in_use() {
        for (text, key) in [
            ("meanpool", Some("tau")),
            ("meanpool:top_k=5", Some("top_k")),
            ("oracle_topk", Some("k")),
            ("oracle_topk:tau=0.5", Some("tau")),
            ("streamingllm:reindex=true", None),
            ("quest", None),
        ] {
            assert_eq!(parsed(text).knob(), key, "{text}");
        }
    }

    #[test]
    fn a_label_has_only_settings_that_differ_from_their_defaults() {
        for asked in [
            "meanpool",
            "quest:budget=64",
            "xattention:stride=16,tau=0.5",
            "delta:base.n_local=77,gamma=8",
            "delta:base=xattention,base.tau=0.5",
        ] {
            let label = parsed(asked).label();
            assert_eq!(parsed(&label), parsed(asked), "{label}");
            assert_eq!(label.len(), asked.len(), "{label}");
        }
        let label = parsed("pbs:segment=512,tau=0.5").label_without("tau");
        assert_eq!(label, "pbs:segment=512");
    }
}
