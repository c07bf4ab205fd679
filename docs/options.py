OPTIONS = {}
def text(): return ""
