//! Reads and writes the bodies of EC2's query protocol: `Action=RunInstances&InstanceId.1=…`. Pure.

use std::collections::BTreeMap;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// Parameters of one call.
pub type Params = BTreeMap<String, String>;

/// Writes a form.
pub fn encode(params: &Params) -> String {
    let escape = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let pairs: Vec<String> = params.iter().map(|(k, v)| format!("{}={}", escape(k), escape(v))).collect();
    pairs.join("&")
}

/// Returns the values of a list, in its order: `list(&params, "InstanceId")` reads `InstanceId.1`, `InstanceId.2`, …
pub fn list(params: &Params, name: &str) -> Vec<String> {
    (1..).map_while(|n| params.get(&format!("{name}.{n}")).cloned()).collect()
}

#[cfg(test)]
mod tests {
    use peerpod_test_clouds::pairs;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let text =
            "Action=RunInstances&Tag.1.Value=a%20b%2B%26%C3%A4&Tag.2.Value=x+y&InstanceId.1=i&InstanceId.2=j";
        let params = pairs(text);
        assert_eq!(params["Tag.1.Value"], "a b+&ä");
        assert_eq!(params["Tag.2.Value"], "x y");
        assert_eq!(list(&params, "InstanceId"), ["i", "j"]);
        assert_eq!(pairs(&encode(&params)), params);
    }
}
