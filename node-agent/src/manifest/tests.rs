use super::*;

const HELLO: &str = "\
api_version: bcd/v1
kind: Network
name: lan
spec:
  type: nat
  cidr: 10.77.0.0/24
---
# An empty document is left out.
---
api_version: bcd/v1
kind: Instance
name: web
labels: {tier: front}
spec:
  cpus: 1
  memory_mib: 256
  boot:
    kind: oci_image
    ref: hello
  nics:
    - name: eth0
      network: lan
";

fn errors(text: &str) -> Vec<String> {
    parse(text).unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn several_documents_are_read_and_empty_ones_are_left_out() {
    let read = parse(HELLO).unwrap();
    let names: Vec<_> = read.iter().map(|one| (one.document, one.key().to_string())).collect();
    assert_eq!(names, [(1, "Network lan".to_owned()), (3, "Instance web".to_owned())]);
}

#[test]
fn json_documents_one_after_the_other_are_read() {
    let text = r#"{"api_version":"bcd/v1","kind":"Image","name":"a","spec":{"ref":"localhost/a:1"}}
        {"api_version":"bcd/v1","kind":"Volume","name":"b","spec":{"size_gib":1}}"#;
    assert_eq!(parse(text).unwrap().len(), 2);
    let bad = text.replace("size_gib", "size_gb");
    let wanted = "Volume b: spec.size_gb: unknown field (did you mean \"size_gib\"?)";
    assert!(errors(&bad)[0].contains(wanted), "{:?}", errors(&bad));
}

#[test]
fn a_flow_mapping_that_is_no_json_is_read_as_yaml() {
    let text = "{api_version: bcd/v1, kind: Volume, name: b, spec: {size_gib: 1}}";
    assert_eq!(parse(text).unwrap().len(), 1);
}

#[test]
fn an_unknown_field_is_told_with_document_line_object_path_and_the_nearest_name() {
    let text = HELLO.replace("network: lan", "netwrok: lan");
    let wanted = "document 3, line 22, Instance web: spec.nics[0].netwrok: unknown field (did you mean \"network\"?)";
    assert_eq!(errors(&text), [wanted]);
}

#[test]
fn every_faulty_document_is_told_not_only_the_first() {
    let text = HELLO.replace("type: nat", "type: natt").replace("cpus: 1", "cpus: 1.5");
    let found = errors(&text);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("line 5, Network lan: spec.type: \"natt\""), "{found:?}");
    assert!(
        found[1].contains("line 15, Instance web: spec.cpus: wanted a whole number"),
        "{found:?}"
    );
}

#[test]
fn bad_heads_say_what_is_known() {
    let cases = [
        ("[]", "document 1: wanted a mapping with api_version, kind, name and spec"),
        ("", "the text holds no document"),
        ("---\n---\n", "the text holds no document"),
        ("a: 1", "document 1: api_version: the field is required (write api_version: bcd/v1)"),
        (
            "api_version: v2\nkind: Instance",
            "document 1, Instance: api_version: \"v2\" is not known (this agent reads bcd/v1)",
        ),
        (
            "api_version: bcd/v1\nkind: instance",
            "document 1, instance: kind: \"instance\" is no kind (did you mean \"Instance\"?)",
        ),
        (
            "api_version: bcd/v1\nkind: Volum",
            "document 1, Volum: kind: \"Volum\" is no kind (did you mean \"Volume\"?)",
        ),
        (
            "api_version: bcd/v1\nkind: Volume\nspec: {size_gib: 1}",
            "document 1, line 1, Volume: name: the field is required",
        ),
    ];
    for (text, wanted) in cases {
        assert_eq!(errors(text), [wanted], "{text:?}");
    }
}

#[test]
fn a_name_that_would_forge_a_log_line_is_refused_and_shown_escaped() {
    let text = "api_version: bcd/v1\nkind: Volume\nname: \"a\\nERROR forged \\e[31m\"\nspec: {size_gib: 1}";
    let found = errors(text).join("");
    assert!(found.contains("a\\nERROR forged \\u{1b}[31m"), "{found}");
    assert!(!found.contains('\n') && !found.contains('\u{1b}'), "{found:?}");
}

#[test]
fn one_object_or_identity_twice_is_refused() {
    let volume = |name: &str, uuid: &str| {
        format!(
            "api_version: bcd/v1\nkind: Volume\nname: {name}\nuuid: {uuid}\nspec: {{size_gib: 1}}\n"
        )
    };
    let one = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";
    let two = "0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f6a";
    let text = format!("{}---\n{}", volume("a", one), volume("a", two));
    assert_eq!(errors(&text), ["document 2, Volume a: name: document 1 has it too"]);
    let text = format!("{}---\n{}", volume("a", one), volume("b", &one.to_uppercase()));
    assert_eq!(errors(&text), ["document 2, Volume b: uuid: document 1 has it too"]);
}

#[test]
fn every_other_spelling_of_a_uuid_is_refused_with_its_field() {
    for uuid in [
        "{3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b}",
        "urn:uuid:3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b",
        "3f2b8c1e9a4d4e6f8b7a1c2d3e4f5a6b",
        "00000000-0000-0000-0000-000000000000",
        "",
        "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6",
        "../../../../tmp/agent-escape",
        " 3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b",
        "\\uff13f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b",
        "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b\\n",
        "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b\\0.xml",
    ] {
        let text = format!(
            "api_version: bcd/v1\nkind: Volume\nname: a\nuuid: \"{uuid}\"\nspec: {{size_gib: 1}}"
        );
        let found = errors(&text).join("");
        assert!(found.contains("uuid: ") && found.contains("not a valid UUID"), "{uuid}: {found}");
    }
}

#[test]
fn a_key_that_is_there_twice_is_refused_in_yaml_and_json() {
    let yaml = "api_version: bcd/v1\nkind: Volume\nname: a\nlabels:\n  x: one\n  x: two\nspec: {size_gib: 1}";
    let found = errors(yaml).join("");
    assert!(found.contains("the key \"x\" is there twice"), "{found}");
    let json =
        r#"{"api_version":"bcd/v1","kind":"Volume","name":"a","name":"b","spec":{"size_gib":1}}"#;
    assert!(errors(json).join("").contains("the key \"name\" is there twice"));
}

#[test]
fn aliases_that_expand_without_bound_are_refused() {
    let mut text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for (this, last) in "bcdefghij".chars().zip("abcdefghi".chars()) {
        text.push_str(&format!(
            "{this}: &{this} [*{last}, *{last}, *{last}, *{last}, *{last}, *{last}, *{last}, *{last}, *{last}]\n"
        ));
    }
    let found = errors(&text).join("");
    assert!(found.contains("too large") || found.contains("repetition"), "{found}");
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(errors(&deep).join("").contains("recursion limit"));
    let large = " ".repeat(MAX_TEXT_BYTES + 1);
    assert!(errors(&large).join("").contains("apply it in several parts"));
}

#[test]
fn tags_and_odd_numbers_are_refused() {
    for spec in ["!!binary aGVsbG8=", "{size_gib: .nan}", "{size_gib: !x 1}", "{1: 2}"] {
        let text = format!("api_version: bcd/v1\nkind: Volume\nname: a\nspec: {spec}");
        assert!(parse(&text).is_err(), "{spec}");
    }
}

#[test]
fn what_get_prints_can_be_applied_again() {
    for manifest in parse(HELLO).unwrap() {
        let mut wanted = Wanted::new(
            "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap(),
            manifest.name.clone(),
            manifest.spec.clone(),
        );
        wanted.labels = manifest.labels.clone();
        let mut value = serde_json::to_value(Document::of(&wanted).unwrap()).unwrap();
        value["status"] = serde_json::json!({"phase": "Ready"});
        let again = parse(&serde_yaml_ng::to_string(&value).unwrap()).unwrap();
        assert_eq!(again[0].spec, manifest.spec);
        assert_eq!(again[0].uuid, Some(wanted.uuid));
        assert_eq!(again[0].labels, manifest.labels);
    }
}
