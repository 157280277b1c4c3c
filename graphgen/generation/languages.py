"""The languages that Whisper hears (arXiv 2212.04356), by name."""

_NAMES = """
af afrikaans; am amharic; ar arabic; as assamese; az azerbaijani; ba bashkir; be belarusian; bg
bulgarian; bn bengali; bo tibetan; br breton; bs bosnian; ca catalan, valencian; cs czech; cy
welsh; da danish; de german; el greek; en english; es spanish, castilian; et estonian; eu basque;
fa persian; fi finnish; fo faroese; fr french; gl galician; gu gujarati; ha hausa; haw hawaiian;
he hebrew; hi hindi; hr croatian; ht haitian creole, haitian; hu hungarian; hy armenian; id
indonesian; is icelandic; it italian; ja japanese; jw javanese; ka georgian; kk kazakh; km khmer;
kn kannada; ko korean; la latin; lb luxembourgish, letzeburgesch; ln lingala; lo lao; lt
lithuanian; lv latvian; mg malagasy; mi maori; mk macedonian; ml malayalam; mn mongolian; mr
marathi; ms malay; mt maltese; my myanmar, burmese; ne nepali; nl dutch, flemish; nn nynorsk; no
norwegian; oc occitan; pa punjabi, panjabi; pl polish; ps pashto, pushto; pt portuguese; ro
romanian, moldavian, moldovan; ru russian; sa sanskrit; sd sindhi; si sinhala, sinhalese; sk
slovak; sl slovenian; sn shona; so somali; sq albanian; sr serbian; su sundanese; sv swedish; sw
swahili; ta tamil; te telugu; tg tajik; th thai; tk turkmen; tl tagalog; tr turkish; tt tatar; uk
ukrainian; ur urdu; uz uzbek; vi vietnamese; yi yiddish; yo yoruba; yue cantonese; zh chinese,
mandarin
"""
"""The code of each language in Whisper's tokens, and its names."""

_CODES = {
    name: code
    for language in " ".join(_NAMES.split()).split("; ")
    for code, _, names in [language.partition(" ")]
    for name in names.split(", ")
}


def token_of(language: str) -> str:
    """The token of a language, by its name, its code or the token: <|fr|> of French."""
    code = language.strip("<|>").lower()
    return f"<|{_CODES.get(code, code)}|>"
