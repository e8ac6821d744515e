"""The page of `sieve serve` in Chromium: types, reads, stops, asks again, and looks at where its requests go.

usage: page.py SIEVE CHECKPOINT [--chromium PATH] [--pictures FOLDER]

Needs `pip install playwright` and a Chromium, whose path is /usr/bin/chromium where none is given. CHECKPOINT is a
small model with a tokenizer.json and without a chat template; a copy with a template answers chats, behind an API key.
What the page shows is compared with what the server answers to the same request. With --pictures the page is drawn
at a width of 1300 and of 390 pixels, in light and dark.
"""

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

KEY = "secret of the test"
TEMPLATE = """{% for message in messages %}{{ message.role + ":\\n" + message.content + "\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "assistant:\\n" }}{% endif %}"""
# What a person wrote and a model answered must stay text.
HOSTILE = "<img src=x onerror=\"document.title='broken in'\"> and\n```html\n<b>code</b>\n```"
# Controls in the order in which Tab reaches them, before the first prompt of a model without a chat template.
WIDE = ["To the prompt", "New conversation", "temperature", "length", "log", "fn main() {", "Once upon a time",
        "The three laws of motion are", "prompt", "Send"]
NARROW = ["To the prompt", "Menu", *WIDE[4:]]
FOCUSED = """(at => at === document.body ? '' : at.id && !at.matches('button') ? at.id : at.textContent)
    (document.activeElement)"""


class Server:
    """A running server."""

    def __init__(self, sieve, checkpoint, *more):
        command = [sieve, "serve", "--checkpoint", str(checkpoint), "--name", "served", "--port", "0"]
        self.process = subprocess.Popen([*command, "--device", "cpu", *more], stdout=subprocess.PIPE, text=True)
        self.key = KEY if more else None
        for line in self.process.stdout:
            if "/v1:" in line:
                self.origin = "http://" + line.split("http://")[1].split("/v1")[0]
                return
        raise SystemExit("the server ended")

    def ask(self, path, body=None, method=None):
        """What the server answers: a response with `text`."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.origin + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as response:
            response.text = response.read().decode()
            return response

    def answer(self, path, body):
        return json.loads(self.ask(path, body).text)

    def metric(self, name):
        return int(re.search(rf"^{name} (\d+)$", self.ask("/metrics").text, re.M).group(1))

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=60)


class Visit:
    """The page in a tab, with all that it asked for and complained about."""

    def __init__(self, browser, server, width=1300, scheme="light"):
        self.server, self.requests, self.complaints = server, [], []
        self.context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        self.tab = self.context.new_page()
        self.tab.on("request", lambda request: self.requests.append((request.url, request.post_data)))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        # A refused request is a complaint of Chromium's too, and expected.
        refused = "Failed to load resource"
        self.tab.on("console", lambda said: refused in said.text or self.complaints.append(said.text))
        self.tab.on("dialog", lambda dialog: dialog.accept())
        self.tab.goto(server.origin + "/")

    def opened(self):
        self.until(lambda: self.tab.text_content("#model") == "served")
        return self

    def until(self, is_so):
        # Playwright's own waiting for a function needs `eval`, which the page's policy forbids.
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < 60, "waited for a minute"
            self.tab.wait_for_timeout(20)

    def set(self, name, value):
        """Writes a setting by keyboard."""
        self.tab.focus(f"#{name}")
        self.tab.keyboard.press("Control+A")
        self.tab.keyboard.type(value)
        self.tab.keyboard.press("Tab")

    def send(self, text):
        self.tab.focus("#prompt")
        for number, line in enumerate(text.split("\n")):
            if number:
                self.tab.keyboard.press("Shift+Enter")
            self.tab.keyboard.type(line)
        self.tab.keyboard.press("Enter")

    def wait(self):
        """Waits until an answer has ended."""
        self.tab.wait_for_selector(".turn:last-child .acts", timeout=120_000)

    def wait_for_text(self, least):
        self.until(lambda: len(self.last()) > least)

    def last(self, kind="raw"):
        return self.tab.text_content(f".turn:last-child .{kind}")

    def foot(self):
        return self.tab.text_content(".turn:last-child .foot")

    def press(self, words):
        """A button below the last answer, by keyboard."""
        self.tab.locator(".turn:last-child .acts button", has_text=words).focus()
        self.tab.keyboard.press("Enter")

    def bodies(self):
        return [json.loads(body) for _, body in self.requests if body]

    def reload(self):
        self.tab.reload()
        return self.opened()

    def order(self):
        """What Tab reaches, from the beginning of the page to its end."""
        self.tab.focus(".skip")
        reached = [self.tab.evaluate(FOCUSED)]
        while reached[-1] not in ("", "Send") and len(reached) < 40:
            self.tab.keyboard.press("Tab")
            reached.append(self.tab.evaluate(FOCUSED))
        return reached

    def is_within(self):
        """Whether nothing is wider than the window; blocks of code scroll by themselves."""
        boxes = ["document.documentElement", "document.getElementById('log')", "document.getElementById('side')"]
        widths = self.tab.evaluate(f"[{', '.join(f'{box}.scrollWidth - {box}.clientWidth' for box in boxes)}]")
        num_outside = self.tab.evaluate("""[...document.querySelectorAll('body *:not(pre *)')].filter(
            one => one.getClientRects().length && one.getBoundingClientRect().right > innerWidth + 0.5).length""")
        return widths == [0, 0, 0] and num_outside == 0

    def close(self):
        urls = {url for url, _ in self.requests if not url.startswith("data:")}
        assert all(url.startswith(self.server.origin + "/") for url in urls), f"a request left the origin: {urls}"
        assert not self.complaints, self.complaints
        self.context.close()


def check_headers(server):
    for method in ("GET", "HEAD"):
        response = server.ask("/", method=method)
        policy = response.headers["content-security-policy"]
        assert response.headers["content-type"] == "text/html; charset=utf-8", response.headers
        assert response.headers["x-content-type-options"] == "nosniff", response.headers
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy, policy
        assert bool(response.text) == (method == "GET")
    page = server.ask("/").text
    elsewhere = [at for at in re.findall(r"\w+://[^'\"\s]+", page) if "www.w3.org/2000/svg" not in at]
    assert not elsewhere, f"the page names other places: {elsewhere}"
    print("headers: a policy that lets the page ask its own server alone")


def check_text(browser, server):
    """A model without a chat template: continues, stops, asks again, goes on, keeps."""
    visit = Visit(browser, server).opened()
    assert visit.order() == WIDE, visit.order()
    visit.set("temperature", "0")
    visit.set("length", "24")
    prompt = "fn main() {\n    let"
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    greedy = server.answer("/v1/completions", body)
    visit.send(prompt)
    visit.wait()
    text = prompt + greedy["choices"][0]["text"]
    assert visit.last() == text, (visit.last(), text)
    keys = greedy["usage"]["keys"]
    assert keys["all"] == greedy["usage"]["prompt_tokens"] + 23 and 0 < keys["read"] <= keys["all"], keys
    for words in ("24 tokens", "tokens a second", "keys"):
        assert words in visit.foot(), visit.foot()
    assert "complete" in visit.tab.text_content("#spoken"), visit.tab.text_content("#spoken")
    print(f"text: the page has the server's greedy completion; it says {visit.foot()!r}")

    visit.press("Again")
    visit.wait()
    assert visit.last() == text, visit.last()
    visit.press("Go on")
    visit.wait()
    longer = text + server.answer("/v1/completions", {**body, "prompt": text})["choices"][0]["text"]
    assert visit.last() == longer, (visit.last(), longer)
    assert [body["prompt"] for body in visit.bodies()] == [prompt, prompt, text]

    # A long text, which repeats itself and does not end: Esc stops it, in the server too. Then the same by the button.
    visit.set("length", "1000")
    for way in ("Escape", "button"):
        cancelled = server.metric("sieve_cancelled_texts_total")
        visit.send("fn main() {")
        visit.wait_for_text(12)
        if way == "Escape":
            visit.tab.keyboard.press("Escape")
        else:
            visit.tab.focus("#stop")
            visit.tab.keyboard.press("Enter")
        visit.wait()
        assert visit.foot().startswith("stopped"), visit.foot()
        visit.until(lambda: server.metric("sieve_cancelled_texts_total") > cancelled)
        assert visit.tab.evaluate("document.activeElement.id") == "prompt"
    print(f"stop: after {len(visit.last())} characters, and the server stops too")
    visit.set("temperature", "1.5")
    visit.set("length", "5")
    visit.press("Again")
    visit.wait()
    asked = visit.bodies()[-1]
    assert (asked["temperature"], asked["max_tokens"]) == (1.5, 5), asked
    drawn = visit.last()

    visit.reload()
    texts = visit.tab.locator(".raw").all_text_contents()
    assert len(texts) == 3 and texts[0] == longer and texts[2] == drawn, texts
    assert visit.tab.input_value("#temperature") == "1.5" and visit.tab.input_value("#length") == "5"
    # A wrong setting is said, and nothing is sent.
    asked = len(visit.bodies())
    visit.set("temperature", "9")
    visit.send("t")
    assert "from 0 to 2" in visit.tab.text_content("#problem") and len(visit.bodies()) == asked
    visit.set("temperature", "0")
    # More than fits is said in the server's words.
    visit.set("length", "1024")
    visit.tab.focus("#prompt")
    visit.tab.keyboard.press("Enter")
    visit.wait()
    assert "do not fit into the context" in visit.tab.text_content(".turn:last-child .error")
    visit.press("Edit prompt")
    assert visit.tab.input_value("#prompt") == "t" and visit.tab.locator(".turn").count() == 3
    # A fault of the server in the middle of its answer: what it wrote stays, with the server's words below.
    fault = {"message": "the model failed on this request", "type": "server_error", "param": None, "code": None}
    events = [{"choices": [{"text": " half", "index": 0, "finish_reason": None}], "usage": None}, {"error": fault}]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    answers = {"content_type": "text/event-stream", "body": stream}
    visit.tab.route("**/v1/completions", lambda route: route.fulfill(**answers))
    visit.set("length", "5")
    visit.tab.focus("#prompt")
    visit.tab.keyboard.press("Enter")
    visit.wait()
    assert visit.last() == "t half" and "The model failed" in visit.tab.text_content(".turn:last-child .error")
    visit.tab.unroute("**/v1/completions")
    visit.press("Again")
    visit.wait()
    assert visit.tab.locator(".turn:last-child .error").count() == 0 and visit.last() != "t half"
    # A new conversation, and back to the first; then it is deleted.
    visit.tab.click("#new")
    assert visit.tab.locator(".turn").count() == 0
    visit.tab.click("#list .title")
    assert visit.tab.locator(".turn").count() == 4
    visit.tab.click("#list .delete")
    visit.reload()
    assert visit.tab.locator("#list li").count() == 0 and visit.tab.locator(".turn").count() == 0
    visit.close()
    print("history: is there after a reload, and gone when it is deleted")


def check_chat(browser, server, pictures):
    """A model with a chat template, behind a key."""
    visit = Visit(browser, server)
    for key in ("wrong", KEY):
        visit.tab.wait_for_selector("#key-dialog[open]")
        visit.tab.keyboard.type(key)
        visit.tab.keyboard.press("Enter")
    visit.opened()
    visit.set("temperature", "0")
    visit.set("length", "16")
    visit.set("system", "A system text.")
    messages = [{"role": "system", "content": "A system text."}]
    for text in ("Where do I live?", HOSTILE):
        messages.append({"role": "user", "content": text})
        greedy = server.answer("/v1/chat/completions", {"messages": messages, "max_tokens": 16, "temperature": 0})
        visit.send(text)
        visit.wait()
        answer = greedy["choices"][0]["message"]["content"]
        # Paragraphs and blocks of code are elements: what marks them is not in their text.
        shown = "".join(visit.tab.locator(".turn:last-child .words > p, .turn:last-child pre").all_text_contents())
        bare = re.sub(r"```\w*|`|\*\*|\s+", "", answer)
        assert re.sub(r"\s+", "", shown) == bare, (shown, answer)
        assert visit.bodies()[-1]["messages"] == messages, visit.bodies()[-1]
        messages.append({"role": "assistant", "content": answer})
    assert visit.tab.locator("img").count() == 0 and visit.tab.title() == "served – Sieve"
    assert visit.tab.text_content(".asked pre") == "<b>code</b>"
    refused = "() => { try { document.body.innerHTML = 'x'; return false; } catch { return true; } }"
    assert visit.tab.evaluate(refused), "text may become elements of the page"
    visit.complaints.clear()
    visit.reload()
    assert visit.tab.locator(".turn").count() == 4 and visit.tab.input_value("#system") == "A system text."
    print("chat: behind a key; the messages of a conversation with its system text; what is written stays text")

    # The same conversation on a phone.
    visit.tab.set_viewport_size({"width": 390, "height": 800})
    assert visit.is_within()
    if pictures:
        visit.tab.screenshot(path=pictures / "chat-390.png")
    visit.tab.focus("#menu")
    visit.tab.keyboard.press("Enter")
    assert visit.is_within() and visit.tab.is_visible("#temperature")
    visit.tab.keyboard.press("Escape")
    assert not visit.tab.is_visible("#temperature") and visit.tab.evaluate("document.activeElement.id") == "prompt"
    server.stop()
    visit.send("Is anyone there?")
    visit.wait()
    assert "cannot be reached" in visit.tab.text_content(".turn:last-child .error")
    assert visit.is_within()
    visit.close()
    print("390 pixels: nothing is wider than the window; a server that is gone is said")


def check_narrow(browser, server, pictures):
    for width, scheme in [(390, "light"), (390, "dark"), (1300, "light"), (1300, "dark")]:
        visit = Visit(browser, server, width, scheme).opened()
        if width == 390:
            assert visit.order() == NARROW, visit.order()
        visit.set("temperature", "0") if width > 390 else None
        visit.send("The " + "longest" * 30)
        visit.wait()
        assert visit.is_within()
        if pictures:
            visit.tab.screenshot(path=pictures / f"text-{width}-{scheme}.png")
        visit.close()
    print("Tab reaches all controls in their order, at 1300 and at 390 pixels")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sieve")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        server = Server(args.sieve, args.checkpoint)
        try:
            check_headers(server)
            check_text(browser, server)
            check_narrow(browser, server, args.pictures)
        finally:
            server.stop()
        chat = Path(folder) / "chat"
        shutil.copytree(args.checkpoint, chat)
        (chat / "chat_template.jinja").write_text(TEMPLATE)
        server = Server(args.sieve, chat, "--api-key", KEY)
        try:
            check_chat(browser, server, args.pictures)
        finally:
            server.stop()
        browser.close()


if __name__ == "__main__":
    main()
